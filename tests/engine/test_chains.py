"""Random chains of conversions: any family through several formats and layouts, and back to Hugging Face, bit for bit.

Each number always gives the same chain: `pytest tests/engine/test_chains.py -k "[17]"`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.errors import LayoutError, NotExpressible
from megaconv.families import families, read_config
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.layout import Chunk, Layout
from megaconv.model.meaning import lost_fields
from megaconv.model.naming import HF
from megaconv.model.natives import native_tensors
from tests.config_models import BEYOND_MEGATRON, raw_config, raw_gpt2
from tests.families.test_encoder_config import BERT, T5
from tests.models import write_config
from tests.strategies import OF_BART, OF_T5

FAMILIES = sorted(families().keys() - {"biencoder", "retro", *BEYOND_MEGATRON})
"""All families with a config.json that Megatron's formats can hold."""
CHAINS = 3 * len(FAMILIES)
SOME: list[Any] = []
"""The numbers of chains. Half of the families are checked in the fast tests, once each."""
for number in range(CHAINS):
    is_fast = number < len(FAMILIES) and number % 2 == 0
    SOME.append(pytest.param(number, marks=[] if is_fast else pytest.mark.slow))
MANY = range(CHAINS, CHAINS + 400)
HOPS = 3


def config_of(family: str, random: Random) -> dict[str, Any]:
    """A config.json with sizes that few layouts divide evenly."""
    layers = random.randint(1, 5)
    vocab = random.randint(5, 140)
    if family == "gpt2":
        return raw_gpt2(n_layer=layers, n_head=4, vocab_size=vocab)
    if family == "bert":
        return BERT | {"num_attention_heads": 4, "num_hidden_layers": layers, "vocab_size": vocab}
    if family in OF_BART:
        sizes = {f"{stack}_layers": random.randint(1, 4) for stack in ("encoder", "decoder")}
        return raw_config(family) | {**sizes, "vocab_size": vocab}
    if family in ("t5", *OF_T5):
        own = T5 if family == "t5" else raw_config(family)
        return own | {
            "num_heads": 4,
            "num_layers": layers,
            "num_decoder_layers": random.randint(1, 4),
            "vocab_size": vocab,
        }
    raw = raw_config(family)
    kv_heads = random.choice((1, 2, 4, 8))
    if "kv_lora_rank" in raw:  # latent attention has as many key/value heads as heads
        kv_heads = raw["num_key_value_heads"]
    by_layer = config_by_layer(raw, layers, random)
    changed = raw | {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "intermediate_size": 8 * random.randint(1, 9),
        "tie_word_embeddings": random.random() < 0.4,
    }
    if "norm_topk_prob" in raw:
        changed["norm_topk_prob"] = True
    return changed | by_layer


def config_by_layer(raw: dict[str, Any], layers: int, random: Random) -> dict[str, Any]:
    """The keys that list something for each layer, for another number of layers."""
    found: dict[str, Any] = {}
    for name, value in raw.items():
        if isinstance(value, list) and len(value) == raw["num_hidden_layers"]:
            found[name] = [value[layer % len(value)] for layer in range(layers)]
    if "mlp_only_layers" in raw:
        found["mlp_only_layers"] = [layer for layer in range(layers) if random.random() < 0.4]
    if "first_k_dense_replace" in raw:
        found["first_k_dense_replace"] = random.randint(0, layers)
    if "hybrid_override_pattern" in raw:
        others = random.choices("M*-E", k=layers - 1)
        found["hybrid_override_pattern"] = "M" + "".join(others)
    return found


def random_bits(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Random bits. Values near 1 for the norms that Transformer Engine's layers store less 1."""
    width = torch.finfo(dtype).bits
    half = 1 << width - 1
    drawn = torch.randint(-half, half, shape, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return (1 + drawn % 64 / 128).to(dtype)
    integers = torch.int16 if width == 16 else torch.int32
    return drawn.to(integers).view(dtype)


def write_model(
    family: str,
    path: Path,
    random: Random,
    keys: Mapping[str, Any] = MappingProxyType({}),
    values: Callable[..., torch.Tensor] = random_bits,
) -> Path:
    """A Hugging Face directory with random bits, some of which are no numbers.

    keys: further keys of config.json. values: a function that makes other tensors.
    """
    dtype = random.choice((torch.bfloat16, torch.float16, torch.float32))
    dtype_name = str(dtype).removeprefix("torch.")
    raw = config_of(family, random)
    write_config(path, {**raw, **keys, "torch_dtype": dtype_name})
    table, config = read_config(path / CONFIG_NAME)
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    tensors: dict[str, torch.Tensor] = {}
    first_names: dict[tuple[str, ...], str] = {}
    for native in native_tensors(table.rows, config, HF, Layout(), 0, whole, config.vocab):
        name = native.name
        first = first_names.setdefault(tuple(native.parts), name)
        if native.copy is None:
            tensors[name] = values(name, native.shape, dtype, generator)
        elif native.copy.written:
            # It comes with the layers that predict further tokens, and with a head that its class doesn't tie.
            tensors[name] = tensors[first].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def random_target(family: str, random: Random, *, experts: bool) -> dict[str, Any]:
    """Any saver at any layout, also one that can't write the model. experts: the model has experts."""
    saver = random.choice(("hf", "dcp", "core", "core", "core", "core", "legacy", "llama_mistral"))
    found: dict[str, Any] = {"saver": saver}
    if saver == "llama_mistral":
        found["checkpoint_type"] = random.choice(("meta", "mistral"))
        return found
    if saver in ("hf", "dcp"):
        return found
    found["tp"] = random.choice((1, 2, 4))
    found["pp"] = random.choice((1, 1, 2, 3))
    has_stages = found["pp"] > 1
    if has_stages and random.random() < 0.4:
        found["vpp"] = 2
    if has_stages and family == "t5":
        found["split_rank"] = random.randint(1, found["pp"] - 1)
    if saver == "legacy":
        return found
    found["ckpt_format"] = random.choice(("torch", "torch", "torch_dist", "zarr"))
    found["transformer_impl"] = random.choice(("transformer_engine", "local"))
    found["make_vocab_size_divisible_by"] = random.choice((1, 7, 64, 128))
    if experts:
        can_group = found["transformer_impl"] == "transformer_engine"
        found["ep"] = random.choice((1, 2, 3, 4))
        found["etp"] = random.choice((None, 1, 2))
        found["moe_grouped_gemm"] = can_group and random.random() < 0.5
    return found


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def run_chain(number: int, folder: Path) -> list[dict[str, Any]]:
    """Run the chain of a number and check each output. Returns the options of the conversions that were possible."""
    random = Random(number)
    family = FAMILIES[number % len(FAMILIES)]
    source = write_model(family, folder / "source", random)
    _, config = read_config(source / CONFIG_NAME)
    has_experts = config.experts.count > 0  # the layers of a hybrid may all be of other kinds
    expected = megaconv.fingerprint(source).weights
    last = source
    made: list[dict[str, Any]] = []
    for _ in range(40):
        options = random_target(family, random, experts=has_experts)
        if len(made) == HOPS:
            break
        output = folder / f"at{len(made)}"
        workers = random.randint(1, 3)
        try:
            report = megaconv.convert(last, output, workers=workers, **options)
        except (LayoutError, NotExpressible):
            continue
        last = output
        made.append(options)
        assert report.fingerprint is not None
        reported = report.fingerprint.weights
        written = megaconv.fingerprint(output).weights
        assert reported == expected, made
        assert written == expected, made
    back = folder / "back"
    megaconv.convert(last, back, saver="hf")
    check_same_weights(back, source, made)
    check_same_config(back, source, made)
    return made


def check_same_weights(back: Path, source: Path, made: list[dict[str, Any]]) -> None:
    """Both directories have the same names, shapes, dtypes and bits."""
    ours = weights_of(back)
    theirs = weights_of(source)
    assert ours.keys() == theirs.keys(), made
    for name, expected in theirs.items():
        found = ours[name]
        assert found.shape == expected.shape, (name, made)
        assert found.dtype == expected.dtype, (name, made)
        assert bits(found) == bits(expected), (name, made)


def check_same_config(back: Path, source: Path, made: list[dict[str, Any]]) -> None:
    """The config.json came through unchanged; through params.json, which replaces it, no field was lost."""
    ours = back / CONFIG_NAME
    theirs = source / CONFIG_NAME
    if any(options["saver"] == "llama_mistral" for options in made):
        _, now = read_config(ours)
        _, before = read_config(theirs)
        assert not lost_fields(now, before), made
    else:
        assert json.loads(ours.read_text()) == json.loads(theirs.read_text()), made


@pytest.mark.parametrize("number", SOME)
def test_a_chain_of_conversions_comes_back_bit_for_bit(number: int, tmp_path: Path) -> None:
    made = run_chain(number, tmp_path)
    assert len(made) == HOPS


@pytest.mark.slow
@pytest.mark.parametrize("number", MANY)
def test_many_more_chains_come_back_bit_for_bit(number: int, tmp_path: Path) -> None:
    made = run_chain(number, tmp_path)
    assert len(made) == HOPS
