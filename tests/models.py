"""Small models with random weights, as transformers would have saved them; written with torch and safetensors."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from formats.safetensors import SafetensorsLayout

NAMES = {
    "safetensors": "model{}.safetensors",
    "bin": "pytorch_model{}.bin",
    "legacy_bin": "pytorch_model{}.bin",
}
"""transformers' names of weight files."""


def write_llama(
    path: Path,
    *,
    layers: int = 4,
    hidden: int = 32,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int | None = None,
    ffn: int = 56,
    vocab: int = 131,
    tied: bool = False,
    dtype: str = "bfloat16",
    shards: int = 1,
    format: str = "safetensors",  # noqa: A002
    seed: int = 0,
    extra_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face directory and return it.

    format: `safetensors`, `bin` (torch zip files) or `legacy_bin` (torch files before 1.6).
    extra_config: joins config.json and decides about tensors too: `attention_bias` and `mlp_bias` add biases, the
    architectures Qwen2ForCausalLM and Qwen3ForCausalLM those of q, k, v and the norms of q, k.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
        **(extra_config or {}),
    }
    write_config(path, config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.02).to(getattr(torch, dtype))
        for name, shape in _shapes(config)
    }
    _write_weights(path, tensors, shards, format)
    return path


def write_large_llama(path: Path) -> Path:
    """A model of 400 MB that takes no room on the disk: its weights are zeros in a sparse file."""
    write_llama(path, layers=1)
    config = json.loads((path / "config.json").read_text())
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "head_dim": 256,
        "intermediate_size": 5632,
    }
    write_config(path, config | sizes)
    layout = SafetensorsLayout(
        {name: (shape, "bfloat16") for name, shape in _shapes(config | sizes)}
    )
    with (path / "model.safetensors").open("wb") as file:
        for offset, data in layout.headers({}):
            file.seek(offset)
            file.write(data)
        file.truncate(layout.size)
    return path


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape, in model order."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    q_rows, kv_rows = (
        config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads")
    )
    (architecture,) = config["architectures"]
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    qkv_bias = attention_bias or architecture == "Qwen2ForCausalLM"
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        linears = {
            "self_attn.q_proj": (q_rows, hidden, qkv_bias),
            "self_attn.k_proj": (kv_rows, hidden, qkv_bias),
            "self_attn.v_proj": (kv_rows, hidden, qkv_bias),
            "self_attn.o_proj": (hidden, q_rows, attention_bias),
            "mlp.gate_proj": (ffn, hidden, mlp_bias),
            "mlp.up_proj": (ffn, hidden, mlp_bias),
            "mlp.down_proj": (hidden, ffn, mlp_bias),
        }
        for name, (rows, cols, bias) in linears.items():
            yield f"{prefix}{name}.weight", (rows, cols)
            if bias:
                yield f"{prefix}{name}.bias", (rows,)
        if architecture == "Qwen3ForCausalLM":
            yield f"{prefix}self_attn.q_norm.weight", (config["head_dim"],)
            yield f"{prefix}self_attn.k_norm.weight", (config["head_dim"],)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _write_weights(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    shards: int,
    format: str,  # noqa: A002
) -> None:
    """One file, or `shards` files of about as many tensors each and their index."""
    pattern = NAMES[format]
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = pattern.format("" if shards == 1 else f"-{number + 1:05d}-of-{shards:05d}")
        members = {
            tensor: value
            for index, (tensor, value) in enumerate(tensors.items())
            if index * shards // len(tensors) == number
        }
        weight_map |= dict.fromkeys(members, name)
        if format == "safetensors":
            save_file(members, path / name, metadata={"format": "pt"})
        else:
            torch.save(members, path / name, _use_new_zipfile_serialization=format == "bin")
    if shards > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / (pattern.format("") + ".index.json")).write_text(json.dumps(index, indent=2))
