"""bitsandbytes' checkpoints of 4 and 8 bits become plain weights: every bit that bitsandbytes 0.50 computes from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.engine.stream import as_lazy
from megaconv.errors import CheckpointError, CorruptCheckpoint, TensorMismatch, UnsupportedInput
from megaconv.values.quantized import dequantize
from tests.conftest import FIXTURES
from tests.values.test_modelopt import EXPORTS, MATRICES, SOURCE
from tests.values.test_quantized import as_torch, assert_same, in_rectangles

Tensors = dict[str, torch.Tensor]
GOLDEN = FIXTURES / "bitsandbytes/golden.safetensors"
CONFIG: dict[str, Any] = {
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}
}
STATE = "nf4.weight.quant_state.bitsandbytes__nf4"
NESTED = "nf4_nested.weight."
TABLE = torch.linspace(-1, 1, 16)
BLOCK = 64


def golden(name: str) -> tuple[Tensors, torch.Tensor]:
    """(the parts of a weight, the weight that bitsandbytes computes from them)."""
    every = load_file(GOLDEN)
    parts = {key: tensor for key, tensor in every.items() if key.startswith(f"{name}.")}
    expected = parts.pop(f"{name}.expected")
    return parts, expected


def read(parts: Tensors, dtype: str) -> Any:
    tensors = {name: as_lazy(tensor) for name, tensor in parts.items()}
    return dequantize(tensors, CONFIG, dtype, "here")


@pytest.mark.parametrize("name", ["nf4", "nf4_nested", "nf4_odd", "fp4", "int8"])
def test_values_are_those_of_bitsandbytes_in_any_rectangle(name: str) -> None:
    parts, expected = golden(name)
    found = read(parts, str(expected.dtype).removeprefix("torch."))
    assert list(found) == [f"{name}.weight"]
    (weight,) = found.values()
    assert_same(as_torch(weight), expected)
    for height, width in ((1, 9), (3, 5), (2, expected.shape[1])):
        assert_same(in_rectangles(weight, height, width), expected)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("name", ["nf4", "nf4_nested", "fp4"])
def test_bytes_may_be_stored_as_another_dtype(name: str, storage: torch.dtype) -> None:
    """As bnb_4bit_quant_storage says, for FSDP."""
    parts, expected = golden(name)
    packed = parts[f"{name}.weight"].reshape(-1)
    parts[f"{name}.weight"] = packed.view(storage).reshape(-1, 1)
    (weight,) = read(parts, str(expected.dtype).removeprefix("torch.")).values()
    assert_same(as_torch(weight), expected)
    assert_same(in_rectangles(weight, 3, 5), expected)


def test_a_parameter_of_another_name_is_read_by_its_state() -> None:
    """Experts in one tensor aren't called weight."""
    parts, expected = golden("nf4")
    renamed = {key.replace("nf4.weight", "experts.down_proj"): parts[key] for key in parts}
    found = read(renamed, str(expected.dtype).removeprefix("torch."))
    assert list(found) == ["experts.down_proj"]
    assert_same(as_torch(found["experts.down_proj"]), expected)


def as_json(**state: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("nf4", {"nf4.weight": None}, TensorMismatch, "there is no nf4.weight"),
        ("nf4", {"nf4.weight": torch.ones(8, 256)}, TensorMismatch, r"nf4.weight is \[8, 256\] float32; expected \[256, 1\] float32"),
        ("nf4", {STATE: None}, TensorMismatch, f"there is no {STATE}"),
        ("nf4", {"nf4.weight.absmax": None}, TensorMismatch, "there is no nf4.weight.absmax"),
        ("nf4", {"nf4.weight.quant_map": torch.ones(8)}, TensorMismatch, r"expected \[16\] float32"),
        ("nf4", {"nf4.weight.absmax": torch.ones(31)}, TensorMismatch, r"expected \[32\] float32"),
        ("nf4", {STATE: as_json(shape=[8, 257], blocksize=64)}, TensorMismatch, r"expected \[1028, 1\] uint8"),
        ("nf4", {STATE: as_json(shape=[8, 256], blocksize=0)}, CorruptCheckpoint, "in blocks of 0"),
        ("nf4", {STATE: as_json(shape=[], blocksize=64)}, CorruptCheckpoint, r"no weight of \[\] in blocks"),
        ("nf4", {STATE: as_json(shape=[8, "x"], blocksize=64)}, CorruptCheckpoint, "a value of a wrong kind"),
        ("nf4", {STATE: as_json(shape=[8, 256])}, CorruptCheckpoint, "blocksize: is missing"),
        ("nf4", {STATE: as_json(shape=[8, 256], blocksize="64")}, CorruptCheckpoint, "blocksize: should be a whole number"),
        ("nf4", {STATE: torch.zeros(4, dtype=torch.uint8)}, CorruptCheckpoint, "JSONDecodeError"),
        ("nf4", {STATE: torch.zeros(70000, dtype=torch.uint8)}, CorruptCheckpoint, "expected the bytes of a short JSON"),
        ("nf4_nested", {f"{NESTED}nested_absmax": None}, TensorMismatch, "there is no nf4_nested.weight.nested_absmax"),
        ("nf4_nested", {f"{NESTED}absmax": torch.ones(32)}, TensorMismatch, r"expected \[32\] uint8"),
        ("int8", {"int8.SCB": None}, TensorMismatch, "there is no int8.SCB"),
        ("int8", {"int8.SCB": torch.ones(15)}, TensorMismatch, r"expected \[16\] float32"),
        ("int8", {"int8.weight_format": torch.tensor(1)}, UnsupportedInput, "rows of int8.weight are in another order"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(
    name: str, change: dict[str, torch.Tensor | None], error: type[CheckpointError], words: str
) -> None:
    parts, _ = golden(name)
    kept = {key: tensor for key, tensor in {**parts, **change}.items() if tensor is not None}
    with pytest.raises(error, match=words):
        read(kept, "bfloat16")


def quantized(weight: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    """(the parts of a weight with a table of evenly spaced values, the weight that they stand for)."""
    blocks = weight.float().reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    numbers = ((blocks / scales[:, None] + 1) * 7.5).round().to(torch.uint8)
    expected = (TABLE[numbers.long()] * scales[:, None]).reshape(weight.shape)
    pairs = numbers.reshape(-1, 2)
    parts = {
        name: (pairs[:, :1] << 4) | pairs[:, 1:],
        f"{name}.absmax": scales,
        f"{name}.quant_map": TABLE.clone(),
        f"{name}.quant_state.bitsandbytes__nf4": as_json(shape=list(weight.shape), blocksize=BLOCK),
    }
    return parts, expected


def test_a_quantized_model_becomes_a_megatron_checkpoint_and_a_plain_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "quantized"
    source.mkdir()
    described = json.loads((EXPORTS / "src/config.json").read_text())
    (source / "config.json").write_text(json.dumps(described | CONFIG))
    stored = {name: tensor for name, tensor in SOURCE.items() if name not in MATRICES}
    expected = dict(stored)
    for name in MATRICES:
        parts, expected[name] = quantized(SOURCE[name], name)
        stored |= parts
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    assert megaconv.inspect(source).header.source == "hf, safetensors, bitsandbytes (4 bits)"
    megaconv.convert(source, tmp_path / "core", saver="core", tp=2, dtype="fp32")
    assert f"{len(MATRICES)} weights were rounded to 4 or 8 bits before" in caplog.text
    megaconv.convert(tmp_path / "core", tmp_path / "plain", saver="hf", verify=True)
    found = load_file(tmp_path / "plain/model.safetensors")
    assert found.keys() == SOURCE.keys()
    assert all(torch.equal(found[name], expected[name].float()) for name in SOURCE)
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
