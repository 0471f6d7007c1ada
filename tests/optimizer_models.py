"""Optimizer state for small models, made by torch itself and laid out in rank files by a few independent lines."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForTokenClassification,
    MixtralConfig,
    MixtralForSequenceClassification,
)

from megaconv import convert
from tests.families.test_families import write_model
from tests.models import write_llama

SCHEDULER = {
    "max_lr": 0.01, "lr_warmup_steps": 0, "num_steps": 8, "lr_decay_style": "cosine", "lr_decay_steps": 40, "min_lr": 0.001,
    "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 40,
}  # fmt: skip


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
"""A small Llama of transformers."""


def write_trained_llama(
    path: Path,
    *,
    kind: str = "adam",
    dtype: str = "bfloat16",
    layers: int = 4,
    tied: bool = True,
    **sizes: Any,
) -> Path:
    """A Megatron checkpoint of one rank (local layers) with an optimizer three steps old."""
    hf = write_llama(
        path.parent / f"{path.name}-hf", layers=layers, tied=tied, dtype=dtype, **sizes
    )
    return write_trained(hf, path, kind=kind, dtype=dtype)


def write_trained(
    hf: Path,
    path: Path,
    *,
    kind: str = "adam",
    dtype: str = "bfloat16",
    transformer_impl: str = "local",
) -> Path:
    """The same of any model from Hugging Face, whose dtype is given."""
    convert(
        hf,
        path,
        saver="core",
        transformer_impl=transformer_impl,
        make_vocab_size_divisible_by=8,
        iteration=1,
    )
    (file,) = path.glob("*/mp_rank_00/model_optim_rng.pt")
    state = load(file)
    weights = {
        name: tensor
        for name, tensor in state["model"].items()
        if tensor is not None and not name.endswith(("_extra_state", ".expert_bias"))
    }
    state["optimizer"] = trained(weights, kind=kind, float16=dtype != "float32")
    state["opt_param_scheduler"] = dict(SCHEDULER)
    state["args"].lr, state["args"].min_lr, state["args"].weight_decay = 0.01, 0.001, 0.1
    state["args"].optimizer, state["args"].sgd_momentum = kind, 0.9
    torch.save(state, file)
    (path / "megaconv.json").unlink()  # the record of what was written, which this no longer is
    return path


def write_trained_mamba(root: Path, fp32: tuple[str, ...] = ()) -> Path:
    """The same of a Nemotron-H without experts. fp32: how weights end that are in it, and so have no second copy in the optimizer."""
    hf = write_model(root / "hf", "nemotron_h", hybrid_override_pattern="M-*")
    weights = load_file(hf / "model.safetensors")
    in_fp32 = {name: tensor.float() for name, tensor in weights.items() if name.endswith(fp32)}
    save_file(weights | in_fp32, hf / "model.safetensors", metadata={"format": "pt"})
    return write_trained(hf, root / "trained")


def write_trained_critic(root: Path) -> Path:
    """The same of a Llama whose head gives scores, with a bias."""
    config = LlamaConfig(**SIZES, num_labels=3, tie_word_embeddings=False)
    torch.manual_seed(5)
    LlamaForTokenClassification(config).to(torch.bfloat16).save_pretrained(root / "hf")
    return write_trained(root / "hf", root / "trained")


def write_trained_rewards_of_experts(root: Path) -> Path:
    """The same of a Mixtral whose head of scores is in float32, and so has no second copy in the optimizer."""
    torch.manual_seed(6)
    config = MixtralConfig(**SIZES, num_labels=1, num_local_experts=4)
    model = MixtralForSequenceClassification(config).to(torch.bfloat16)
    model.score.float()
    model.save_pretrained(root / "hf")
    return write_trained(root / "hf", root / "trained")


def load(file: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([Namespace]):
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def trained(
    weights: dict[str, torch.Tensor], *, float16: bool, kind: str = "adam"
) -> dict[str, Any]:
    """Train fp32 copies for three steps; the weights become what these are then. In the form of Megatron core 0.16."""
    generator = torch.Generator().manual_seed(9)
    masters = {name: tensor.float().clone() for name, tensor in weights.items()}
    groups: list[dict[str, Any]] = [
        {
            "params": [m for m in masters.values() if m.dim() > 1],
            "weight_decay": 0.1,
            "wd_mult": 1.0,
        },
        {
            "params": [m for m in masters.values() if m.dim() == 1],
            "weight_decay": 0.0,
            "wd_mult": 0.0,
        },
    ]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.01)
    if kind == "sgd":
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    for _ in range(3):
        for master in masters.values():
            master.grad = torch.randn(master.shape, generator=generator) * 1e-3
        optimizer.step()
    for name, tensor in weights.items():
        tensor.copy_(masters[name])
    inner = optimizer.state_dict()
    for group in inner["param_groups"]:
        group |= {
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "max_lr": 0.01,
            "min_lr": 0.001,
        }
    if not float16:
        return inner
    in_16_bits = {
        id(masters[name]) for name, tensor in weights.items() if tensor.dtype != torch.float32
    }
    copies = [[m.detach() for m in group["params"] if id(m) in in_16_bits] for group in groups]
    return {"optimizer": inner, "fp32_from_fp16_params": copies}
