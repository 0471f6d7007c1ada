"""Random chains of conversions: any family through several formats and layouts, and back to Hugging Face, bit for bit.

Each number is a chain of its own, the same every time: `pytest tests/engine/test_chains.py -k "[17]"`.
"""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import LayoutError, NotExpressible
from megaconv.families import families, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.fields import lost_fields
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF
from megaconv.model.natives import native_tensors
from tests.config_models import raw_config, raw_gpt2
from tests.families.test_encoder_config import BERT, T5
from tests.models import write_config

FAMILIES = sorted(families())
CHAINS = 3 * len(FAMILIES)
SOME = [
    pytest.param(number, marks=[pytest.mark.slow] if number >= len(FAMILIES) or number % 2 else [])
    for number in range(CHAINS)
]
MANY = range(CHAINS, CHAINS + 400)
HOPS = 3


def config_of(family: str, random: Random) -> dict[str, Any]:
    """A config.json with sizes that few layouts divide evenly."""
    layers, vocab = random.randint(1, 5), random.randint(5, 140)
    if family == "gpt2":
        return raw_gpt2(n_layer=layers, n_head=4, vocab_size=vocab)
    if family == "bert":
        return BERT | {"num_attention_heads": 4, "num_hidden_layers": layers, "vocab_size": vocab}
    if family == "t5":
        stacks = {
            "num_layers": layers,
            "num_decoder_layers": random.randint(1, 4),
            "vocab_size": vocab,
        }
        return T5 | {"num_heads": 4} | stacks
    kv_heads = random.choice((1, 2, 4, 8))
    raw = raw_config(family)
    layered: dict[str, Any] = {
        name: [value[layer % len(value)] for layer in range(layers)]
        for name, value in raw.items()
        if isinstance(value, list) and len(value) == raw["num_hidden_layers"]
    }
    if "mlp_only_layers" in raw:
        layered["mlp_only_layers"] = [layer for layer in range(layers) if random.random() < 0.4]
    if "first_k_dense_replace" in raw:
        layered["first_k_dense_replace"] = random.randint(0, layers)
    if "hybrid_override_pattern" in raw:
        layered["hybrid_override_pattern"] = "M" + "".join(random.choices("M*-E", k=layers - 1))
    latent = "kv_lora_rank" in raw
    return raw | {
        "num_hidden_layers": layers,
        "num_key_value_heads": raw["num_key_value_heads"] if latent else kv_heads,
        "vocab_size": vocab,
        "intermediate_size": 8 * random.randint(1, 9),
        "tie_word_embeddings": random.random() < 0.4,
        **({"norm_topk_prob": True} if "norm_topk_prob" in raw else {}),
        **layered,
    }


def write_model(family: str, path: Path, random: Random) -> Path:
    """A Hugging Face directory with random bits, some of which are no numbers."""
    dtype = random.choice((torch.bfloat16, torch.float16, torch.float32))
    write_config(
        path, config_of(family, random) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    )
    table, config = read_config(path / CONFIG_NAME)
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    width, generator = (
        torch.finfo(dtype).bits,
        torch.Generator().manual_seed(random.randrange(1 << 30)),
    )
    integers = torch.int16 if width == 16 else torch.int32
    tensors: dict[str, torch.Tensor] = {}
    first_names: dict[tuple[str, ...], str] = {}
    for native in native_tensors(table.rows, config, HF, Layout(), 0, whole, config.vocab):
        first = first_names.setdefault(tuple(native.parts), native.name)
        if native.copy is None:
            drawn = torch.randint(
                -(1 << width - 1), 1 << width - 1, native.shape, generator=generator
            )
            tensors[native.name] = drawn.to(integers).view(dtype)
            if native.name.endswith(
                "linear_attn.norm.weight"
            ):  # which Transformer Engine's layers store less 1
                tensors[native.name] = (1 + drawn % 64 / 128).to(dtype)
        elif (
            native.copy.written
        ):  # with the layers that predict further tokens, and a head that its class doesn't tie
            tensors[native.name] = tensors[first].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def hop(family: str, random: Random, *, experts: bool) -> dict[str, Any]:
    """Any saver at any layout, whether the model can be written so or not. experts: whether it has any."""
    saver = random.choice(("hf", "dcp", "core", "core", "core", "core", "legacy", "llama_mistral"))
    if saver == "llama_mistral":
        return {"saver": saver, "checkpoint_type": random.choice(("meta", "mistral"))}
    if saver in ("hf", "dcp"):
        return {"saver": saver}
    found: dict[str, Any] = {
        "saver": saver,
        "tp": random.choice((1, 2, 4)),
        "pp": random.choice((1, 1, 2, 3)),
    }
    if found["pp"] > 1 and random.random() < 0.4:
        found["vpp"] = 2
    if family == "t5" and found["pp"] > 1:
        found["split_rank"] = random.randint(1, found["pp"] - 1)
    if saver == "legacy":
        return found
    found["ckpt_format"] = random.choice(("torch", "torch", "torch_dist", "zarr"))
    found["transformer_impl"] = random.choice(("transformer_engine", "local"))
    found["make_vocab_size_divisible_by"] = random.choice((1, 7, 64, 128))
    if experts:
        found |= {"ep": random.choice((1, 2, 3, 4)), "etp": random.choice((None, 1, 2))}
        found["moe_grouped_gemm"] = (
            found["transformer_impl"] == "transformer_engine" and random.random() < 0.5
        )
    return found


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def go(number: int, folder: Path) -> list[dict[str, Any]]:
    """The chain of a number; returns the hops that the model could make."""
    random = Random(number)
    family = FAMILIES[number % len(FAMILIES)]
    source = at = write_model(family, folder / "source", random)
    expected = megaconv.fingerprint(source).weights
    experts = bool(
        read_config(source / CONFIG_NAME)[1].experts.count
    )  # the layers of a hybrid may all be of other kinds
    made: list[dict[str, Any]] = []
    for _ in range(40):
        options = hop(family, random, experts=experts)
        if len(made) == HOPS:
            break
        try:
            report = megaconv.convert(
                at, folder / f"at{len(made)}", workers=random.randint(1, 3), **options
            )
        except (LayoutError, NotExpressible):
            continue
        at = folder / f"at{len(made)}"
        made.append(options)
        assert report.fingerprint is not None
        assert report.fingerprint.weights == expected == megaconv.fingerprint(at).weights, made
    megaconv.convert(at, folder / "back", saver="hf")
    ours, theirs = weights_of(folder / "back"), weights_of(source)
    assert ours.keys() == theirs.keys(), made
    for name, tensor in theirs.items():
        assert (ours[name].shape, ours[name].dtype, bits(ours[name])) == (
            tensor.shape,
            tensor.dtype,
            bits(tensor),
        ), made
    if any(
        options["saver"] == "llama_mistral" for options in made
    ):  # whose params.json replaces config.json
        (_, now), (_, before) = (
            read_config(folder / "back" / CONFIG_NAME),
            read_config(source / CONFIG_NAME),
        )
        assert not lost_fields(now, before), made
    else:
        assert json.loads((folder / "back" / CONFIG_NAME).read_text()) == json.loads(
            (source / CONFIG_NAME).read_text()
        )
    return made


@pytest.mark.parametrize("number", SOME)
def test_a_chain_of_conversions_comes_back_bit_for_bit(number: int, tmp_path: Path) -> None:
    assert len(go(number, tmp_path)) == HOPS


@pytest.mark.slow
@pytest.mark.parametrize("number", MANY)
def test_many_more_chains_come_back_bit_for_bit(number: int, tmp_path: Path) -> None:
    assert len(go(number, tmp_path)) == HOPS
