"""FP8 weights of the method `fp8` in every form that transformers reads: its own values, for all kinds of scales."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.engine.stream import as_lazy
from megaconv.errors import TensorMismatch, UnsupportedInput
from megaconv.values.quantized import dequantize
from tests.families.test_families import write_model
from tests.runs import assert_refused, run
from tests.values.test_quantized import as_torch, assert_same, in_rectangles

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
GENERATOR_SEED = 5
NO_BLOCKS: dict[str, Any] = {
    "activation_scheme": "static",
    "quant_method": "fp8",
    "weight_block_size": None,
}
"""The settings of Ministral 3 and Devstral 2, as they are published."""


def settings(block: list[int] | None) -> dict[str, Any]:
    return {"quantization_config": NO_BLOCKS | {"weight_block_size": block}}


def all_codes() -> torch.Tensor:
    """[16, 32] float8_e4m3fn: each code twice."""
    return torch.arange(256, dtype=torch.uint8).repeat(2).reshape(16, 32).view(torch.float8_e4m3fn)


def expected_of(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values that transformers' own dequantization gives."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    values: torch.Tensor = fp8.Fp8Dequantize(None)._dequantize_one(
        weight, scales, output_dtype=torch.bfloat16
    )
    return values


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", FLOATS)
def test_scales_of_blocks_in_any_float_are_what_transformers_makes_of_them(
    dtype: torch.dtype,
) -> None:
    """The scales of Qwen3's published FP8 models are bfloat16."""
    scales = torch.rand(4, 4, generator=torch.Generator().manual_seed(GENERATOR_SEED)).to(dtype)
    tensors = {"x.weight": as_lazy(all_codes()), "x.weight_scale_inv": as_lazy(scales)}
    (found,) = dequantize(tensors, settings([4, 8]), None, "here").values()
    assert_same(as_torch(found), expected_of(all_codes(), scales))
    assert_same(in_rectangles(found, 3, 5), expected_of(all_codes(), scales))


@pytest.mark.oracle
def test_exponents_in_bytes_are_what_transformers_makes_of_them() -> None:
    exponents = torch.arange(110, 142, dtype=torch.uint8).reshape(16, 2)
    tensors = {"x.weight": as_lazy(all_codes()), "x.weight_scale_inv": as_lazy(exponents)}
    (found,) = dequantize(tensors, settings([1, 16]), None, "here").values()
    assert_same(as_torch(found), expected_of(all_codes(), exponents))


@pytest.mark.oracle
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_scale_of_a_matrix_is_what_transformers_makes_of_it(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    scale = torch.full(shape, 0.0123, dtype=dtype)
    tensors = {
        "x.weight": as_lazy(all_codes()),
        "x.weight_scale_inv": as_lazy(scale),
        "x.activation_scale": as_lazy(torch.tensor(0.7)),
    }
    (found,) = dequantize(tensors, settings(None), None, "here").values()
    assert_same(in_rectangles(found, 3, 5), expected_of(all_codes(), scale.reshape(1, 1)))


def test_blocks_are_of_128_by_128_if_the_settings_do_not_say() -> None:
    """This is the default of transformers' FineGrainedFP8Config."""
    weight = torch.ones(129, 256).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensors = {"x.weight": as_lazy(weight), "x.weight_scale_inv": as_lazy(scales)}
    (found,) = dequantize(
        tensors, {"quantization_config": {"quant_method": "fp8"}}, None, "here"
    ).values()
    corners = as_torch(found)[[0, 127, 128]][:, [0, 127, 128]].float()
    assert corners.tolist() == [[1, 1, 2], [1, 1, 2], [3, 3, 4]]


@pytest.mark.parametrize("block", [[0, 128], [128], "128", [128, 1.5], 128, [True, 2]])
def test_blocks_that_are_none_are_refused(block: Any) -> None:
    with pytest.raises(UnsupportedInput, match=r"weight_block_size .* or null"):
        dequantize({}, settings(block), None, "here")


@pytest.mark.parametrize("shape", [(2,), (2, 4), (0,)])
def test_several_scales_where_the_settings_have_no_blocks_are_refused(shape: tuple[int]) -> None:
    tensors = {
        "x.weight": as_lazy(all_codes()),
        "x.weight_scale_inv": as_lazy(torch.ones(shape)),
    }
    with pytest.raises(TensorMismatch, match=r"x\.weight .* expected a matrix .* with one scale"):
        dequantize(tensors, settings(None), None, "here")


FBGEMM = {
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fbgemm_fp8",
}
"""The settings of the Llama 3.1 405B in FP8 that Meta publishes."""


@pytest.mark.parametrize("shape", [(16, 1), (16,)])
def test_rows_of_fbgemm_are_multiplied_with_their_scales(shape: tuple[int, ...]) -> None:
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(GENERATOR_SEED))
    tensors = {"x.weight": as_lazy(all_codes()), "x.weight_scale": as_lazy(scales)}
    (found,) = dequantize(tensors, {"quantization_config": FBGEMM}, None, "here").values()
    expected = (all_codes().float() * scales.reshape(16, 1)).bfloat16()
    assert_same(as_torch(found), expected)
    assert_same(in_rectangles(found, 3, 5), expected)


def test_fbgemm_needs_a_scale_for_each_row() -> None:
    tensors = {"x.weight": as_lazy(all_codes()), "x.weight_scale": as_lazy(torch.ones(8, 1))}
    with pytest.raises(TensorMismatch, match=r"x\.weight is .* with scales \[8, 1\]"):
        dequantize(tensors, {"quantization_config": FBGEMM}, None, "here")


def quantize(model: Path) -> dict[str, torch.Tensor]:
    """Turn the linear layers of a model into FP8 with one scale each, in place, as Mistral publishes them.

    Returns the values of all weights.
    """
    stored, meant = {}, {}
    for name, tensor in load_file(model / "model.safetensors").items():
        stored[name], meant[name] = tensor, tensor.bfloat16()
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            scale = (tensor.float().abs().max() / 448).bfloat16()
            stored[name] = (tensor.float() / scale.float()).to(torch.float8_e4m3fn)
            stored[f"{module}.weight_scale_inv"] = scale
            stored[f"{module}.activation_scale"] = torch.tensor(0.25, dtype=torch.bfloat16)
            meant[name] = (stored[name].float() * scale.float()).bfloat16()
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = NO_BLOCKS | {"modules_to_not_convert": ["lm_head"]}
    (model / "config.json").write_text(json.dumps(config))
    return meant


def test_a_ministral_in_fp8_as_it_is_published_becomes_a_plain_one(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "ministral3")
    meant = quantize(model)
    megaconv.convert(model, tmp_path / "core", saver="core", tp=2)
    megaconv.convert(tmp_path / "core", tmp_path / "hf", saver="hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        assert_same(found[name], tensor)


def test_inspect_names_the_one_scale_of_each_matrix(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "ministral3")
    quantize(model)
    outcome = run("inspect", model)
    assert outcome.status == 0
    assert "fp8 (one scale for each matrix)" in outcome.out
    (model / "config.json").write_text(
        (model / "config.json")
        .read_text()
        .replace('"weight_block_size": null', '"weight_block_size": [7, 7]')
    )
    assert_refused(run("inspect", model), 3, "with scales [] bfloat16")
