"""Chains of conversions with an optimizer, through formats, layouts, forms and dtypes: every element, as torch alone reads the files.

Each number is a chain of its own, the same every time: `pytest tests/megatron/test_optimizer_chains.py -k "[llama-3]"`.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import megaconv
from megaconv.errors import LayoutError
from tests.conftest import FIXTURES
from tests.families.test_families import write_model
from tests.megatron_oracle import read_rank_file
from tests.optimizer_models import write_trained
from tests.optimizer_readers import (
    MOMENTS,
    Slots,
    read_buffers,
    read_single,
    read_torch_dist,
    read_zarr,
    version_of,
)

VOCAB = 22
FIVE: dict[str, Any] = {"num_hidden_layers": 5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}),
    "tied": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 16}),
    "mixtral": ("mixtral", {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}),
    "nemotron_h": ("nemotron_h", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "mamba": ("nemotron_h", {"num_attention_heads": 4, "num_key_value_heads": 2, "hybrid_override_pattern": "M-M*-", **FIVE}),
    "qwen3_next": ("qwen3_next", {"num_attention_heads": 4, "num_key_value_heads": 2}),
}  # fmt: skip
FEW, MANY, HOPS = 2, 40, 4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def drawn(random: Random, *, experts: bool, last: bool) -> dict[str, Any]:
    """Options of one conversion; the last one of a chain makes the model that it began with."""
    single = {"tp": 1, "pp": 1, "ep": 1, "etp": None, "ckpt_format": "torch"}
    if last:
        return single | {"dtype": "bf16", "use_distributed_optimizer": False}
    found: dict[str, Any] = {"dtype": random.choice((None, None, "fp32", "fp16", "bf16"))}
    if random.random() < 0.25:
        return found | single | {"use_distributed_optimizer": random.random() < 0.7}
    found |= {"ckpt_format": random.choice(("torch", "torch_dist", "torch_dist", "zarr"))}
    if found["ckpt_format"] != "zarr":
        found["use_distributed_optimizer"] = random.choice((None, True, False))
    found |= {"tp": random.choice((1, 2)), "pp": random.choice((1, 2, 3))}
    if experts:
        found["ep"] = random.choice((1, 2))
    return found


def dtype_after(dtype: str, options: dict[str, Any]) -> str:
    return str(options["dtype"] or dtype)


def read(path: Path, options: dict[str, Any], names: list[str]) -> Slots | None:
    """None for rank files of a sharded model."""
    if options["ckpt_format"] == "torch_dist":
        return read_torch_dist(path, names)
    if options["ckpt_format"] == "zarr":
        return read_zarr(path, names)
    if options["tp"] * options["pp"] * (options.get("ep") or 1) > 1:
        return None
    return read_buffers(path) if options["use_distributed_optimizer"] else read_single(path)


def assert_same(found: Slots, wanted: Slots, dtype: str, what: object) -> None:
    """wanted: a 16-bit model's. An fp32 weight is its own master, which distributed forms hold a second time or not at all."""
    masters = wanted["master"]
    names = set(wanted["weight"])
    assert set(found["weight"]) == names, what
    for slot in MOMENTS:
        assert set(found[slot]) == set(masters), (slot, what)
    if dtype != "fp32":
        assert set(found["master"]) == set(masters), what
    for name in names:
        if name not in masters:  # the bias by which experts are chosen, which no optimizer trains
            assert torch.equal(found["weight"][name].float(), wanted["weight"][name].float()), (
                name,
                what,
            )
            continue
        expected = {"weight": masters[name].to(DTYPES[dtype]), "master": masters[name]}
        expected |= {slot: wanted[slot][name] for slot in MOMENTS}
        for slot, tensor in expected.items():
            if name in found.get(slot, {}):
                held = found[slot][name]
                rows = (
                    VOCAB
                    if name.endswith(("word_embeddings.weight", "output_layer.weight"))
                    else len(tensor)
                )
                assert held.dtype == tensor.dtype, (slot, name, what)
                assert torch.equal(held[:rows], tensor[:rows]), (slot, name, what)


def walk(source: Path, wanted: Slots, random: Random, dtype: str, folder: Path) -> tuple[Path, int]:
    """A chain from this checkpoint on. Returns its end, and how many of the checkpoints in between were read."""
    at, made, seen = source, list[dict[str, Any]](), 0
    experts = any(".experts." in name for name in wanted["weight"])
    while len(made) <= HOPS:
        options = drawn(random, experts=experts, last=len(made) == HOPS)
        try:
            megaconv.convert(
                at,
                folder / f"at{len(made)}",
                saver="core",
                make_vocab_size_divisible_by=8,
                **options,
            )
        except LayoutError:
            continue
        at, dtype = folder / f"at{len(made)}", dtype_after(dtype, options)
        made.append(options)
        found = read(at, options, list(wanted["weight"]))
        if found is not None:
            seen += 1
            assert_same(found, wanted, dtype, made)
    return at, seen


def go(model: str, number: int, folder: Path) -> int:
    """The number of checkpoints along the way that were read."""
    family, keys = MODELS[model]
    hf = write_model(folder / "hf", family, vocab_size=VOCAB, **keys)
    source = write_trained(hf, folder / "source", transformer_impl="transformer_engine")
    wanted = read_single(source)
    for name, master in wanted["master"].items():
        assert torch.equal(master.bfloat16(), wanted["weight"][name])
    end, seen = walk(source, wanted, Random(f"{model} {number}"), "bf16", folder)
    assert numbers(end) == numbers(source)
    return seen


def numbers(path: Path) -> Any:
    """The values of an optimizer other than tensors."""
    state = read_rank_file(version_of(path) / "mp_rank_00" / "model_optim_rng.pt")
    inner = state["optimizer"]["optimizer"]
    names = ("lr", "betas", "eps", "weight_decay", "wd_mult", "lr_mult", "max_lr", "min_lr")
    groups = [
        {name: group[name] for name in names} | {"parameters": len(group["params"])}
        for group in inner["param_groups"]
    ]
    steps = {float(held["step"]) for held in inner["state"].values()}
    return groups, steps, state["opt_param_scheduler"]


@pytest.mark.parametrize("number", range(FEW))
@pytest.mark.parametrize("model", MODELS)
def test_a_chain_of_conversions_keeps_every_element_of_an_optimizer(
    model: str, number: int, tmp_path: Path
) -> None:
    assert go(model, number, tmp_path) > 1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FEW, MANY))
@pytest.mark.parametrize("model", MODELS)
def test_many_more_chains_keep_every_element_of_an_optimizer(
    model: str, number: int, tmp_path: Path
) -> None:
    assert go(model, number, tmp_path) > 0


REAL: dict[str, tuple[str, Callable[[Path, list[str]], Slots]]] = {
    "zarr-llama-optim-tp2pp2": ("bf16", read_zarr),
    "dist-llama-optim-dp2-nondist-fp32": ("fp32", read_torch_dist),
    "dist-mixtral-optim-ep2-fully_reshardable": ("bf16", read_torch_dist),
}
"""Checkpoints that Megatron core itself wrote -> their dtype and their reader."""


@pytest.mark.parametrize("name", REAL)
def test_a_chain_of_conversions_keeps_every_element_that_megatron_wrote(
    name: str, tmp_path: Path
) -> None:
    dtype, reader = REAL[name]
    source = FIXTURES / name / ("checkpoint" if name.startswith("zarr") else "")
    megaconv.convert(
        source,
        tmp_path / "single",
        saver="core",
        tp=1,
        pp=1,
        ep=1,
        ckpt_format="torch",
        dtype="bf16",
    )
    wanted = reader(source, list(read_single(tmp_path / "single")["weight"]))
    wanted.setdefault("master", wanted["weight"])
    end, seen = walk(source, wanted, Random(name), dtype, tmp_path)
    assert numbers(end) == numbers(tmp_path / "single")
    assert seen > 1
