"""Casts: every bit is what torch makes of it, and what a dtype can't hold is an error that names the tensor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from formats.tensor import ITEMSIZE, Bytes, read_tensor
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible
from megaconv.values.cast import CastTensor
from megaconv.values.rounding import BeyondRange, convert
from tests.models import write_llama
from tests.runs import assert_refused, run

HALVES = ("float16", "bfloat16")
EDGES = np.array(
    [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xEFFF, 0xF000, 0xFFFF],
    np.uint32,
)
"""Lower halves of float32 at, and one beside, the ties of both 16-bit dtypes."""


def cast(values: Bytes, source: str, target: str, *, overflow: bool = True) -> torch.Tensor:
    made = np.empty(values.size // ITEMSIZE[source] * ITEMSIZE[target], np.uint8)
    convert(values, source, made, target, overflow=overflow)
    return torch.from_numpy(made).view(getattr(torch, target))


def assert_as_torch(values: Bytes, source: str, target: str) -> None:
    """Compare with torch. In casts of float32 and float64 to bfloat16 all NaNs are equal, because torch's bits depend
    on the processor."""
    expected = torch.from_numpy(values).view(getattr(torch, source)).to(getattr(torch, target))
    found = cast(values, source, target)
    unknown = (
        expected.isnan()
        if (source, target) in {("float32", "bfloat16"), ("float64", "bfloat16")}
        else None
    )
    if unknown is not None:
        assert torch.equal(found.isnan(), unknown)
        expected[unknown] = found[unknown] = 0
    width: Any = {2: torch.int16, 4: torch.int32}[ITEMSIZE[target]]
    assert torch.equal(found.view(width), expected.view(width))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("float16", "bfloat16"),
        ("float16", "float32"),
        ("bfloat16", "float16"),
        ("bfloat16", "float32"),
    ],
)
def test_all_values_of_16_bits_are_cast_as_torch_does(source: str, target: str) -> None:
    assert_as_torch(np.arange(1 << 16, dtype=np.uint16).view(np.uint8), source, target)


@pytest.mark.parametrize("target", HALVES)
def test_all_upper_halves_of_float32_with_every_tie_are_rounded_as_torch_does(target: str) -> None:
    bits = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16) | EDGES
    assert_as_torch(bits.reshape(-1).view(np.uint8), "float32", target)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("float32", "float16"),
        ("float32", "bfloat16"),
        *(("float64", target) for target in (*HALVES, "float32")),
    ],
)
def test_a_million_random_patterns_are_rounded_as_torch_does(source: str, target: str) -> None:
    random = np.random.default_rng(0)
    assert_as_torch(
        np.frombuffer(random.bytes(ITEMSIZE[source] << 20), np.uint8).copy(), source, target
    )
    scaled = random.standard_normal(1 << 20) * np.exp2(random.integers(-30, 18, 1 << 20))
    assert_as_torch(scaled.astype(source).view(np.uint8), source, target)


@pytest.mark.parametrize(
    ("source", "target", "fits", "too_large"),
    [
        ("float32", "float16", 65519.996, 65520.0),
        ("float32", "bfloat16", 3.396177e38, 3.396178e38),
        ("bfloat16", "float16", 65280.0, -65536.0),
        ("float64", "float32", 3.4028235e38, 3.5e38),
        ("float64", "float16", 65519.0, -1e300),
    ],
)
def test_the_first_value_beyond_the_range_is_reported(
    source: str, target: str, fits: float, too_large: float
) -> None:
    dtype = getattr(torch, source)
    for values in ([1.0, fits], [float("inf"), float("nan"), -float("inf")]):
        stored = torch.tensor(values, dtype=torch.float64).to(dtype).view(torch.uint8).numpy()
        assert cast(stored, source, target, overflow=False).isinf().sum() == sum(
            map(np.isinf, values)
        )
    stored = torch.tensor([1.0, too_large], dtype=torch.float64).to(dtype).view(torch.uint8).numpy()
    with pytest.raises(BeyondRange):
        cast(stored, source, target, overflow=False)
    assert cast(stored, source, target)[1].isinf()


def test_a_tensor_beyond_the_range_is_named_with_its_largest_value() -> None:
    values = torch.zeros(300, 2000)
    values[1, 7], values[2, 0], values[299, 1999] = 70000.0, float("inf"), -123456.0
    with pytest.raises(
        NotExpressible,
        match=r"x: its largest value, -123456, is beyond the range of float16; .*overflow",
    ):
        read_tensor(CastTensor(as_lazy(values), "float16", "x", overflow=False))


@pytest.mark.parametrize("saver", ["hf", "core"])
def test_a_model_beyond_the_range_of_fp16_is_refused_and_nothing_is_left(
    saver: str, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "hf")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 98304.0
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    command = (
        "convert",
        "--load-dir",
        source,
        "--saver",
        saver,
        "--save-dir",
        tmp_path / "out",
        "--dtype",
        "fp16",
    )
    assert_refused(
        run(*command), 2, "layers.1.mlp.up.weight", "98304", "float16", "--allow-lossy overflow"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert run(*command, "--allow-lossy", "overflow").status == 0
    found = megaconv.open(tmp_path / "out").load("layers.1.mlp.up.weight")
    assert torch.equal(found, weights["model.layers.1.mlp.up_proj.weight"].to(torch.float16))
