"""`--quantize fp8-per-channel`: ModelOpt's own bytes, and an output that is read as its record says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible
from megaconv.values.code_tensors import Rounding
from megaconv.values.fp8_blocks import Fp8Values
from megaconv.values.fp8_rows import Rows, RowScales
from tests.families.test_families import write_model
from tests.models import write_llama
from tests.values.test_modelopt import EXPORTS
from tests.values.test_quantized import as_torch, assert_same, in_rectangles

EXPORT = EXPORTS / "fp8-per-channel-per-token"


def test_weights_and_settings_in_fp8_by_rows_are_those_that_modelopt_writes(tmp_path: Path) -> None:
    megaconv.convert(
        EXPORTS / "src", tmp_path / "out", saver="hf", quantize="fp8-per-channel", verify=True
    )
    expected = load_file(EXPORT / "model.safetensors")
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(
            found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name
    theirs = json.loads((EXPORT / "config.json").read_text())["quantization_config"]
    ours = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert ours.pop("producer")["name"] == "megaconv"
    del theirs["producer"]
    assert ours == theirs
    theirs = json.loads((EXPORT / "hf_quant_config.json").read_text())
    ours = json.loads((tmp_path / "out/hf_quant_config.json").read_text())
    assert ours["quantization"] == theirs["quantization"]


def test_an_output_in_fp8_by_rows_is_read_as_its_record_says(tmp_path: Path) -> None:
    write_llama(tmp_path / "hf", hidden=40, ffn=72, layers=2)
    report = megaconv.convert(
        tmp_path / "hf", tmp_path / "fp8", saver="hf", quantize="fp8-per-channel", verify=True
    )
    assert report.fingerprint is not None
    assert report.rounding is not None
    assert report.rounding.largest > 0
    assert megaconv.fingerprint(tmp_path / "fp8").weights == report.fingerprint.weights
    plain = megaconv.convert(tmp_path / "fp8", tmp_path / "plain", saver="hf")
    assert plain.fingerprint is not None
    assert plain.fingerprint.weights == report.fingerprint.weights


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_an_output_is_read_in_another_dtype_than_its_record_has(tmp_path: Path, dtype: str) -> None:
    write_llama(tmp_path / "hf", layers=1)
    quantized = tmp_path / "fp8"
    megaconv.convert(tmp_path / "hf", quantized, saver="hf", quantize="fp8-per-channel")
    megaconv.convert(quantized, tmp_path / "plain", saver="hf", dtype=dtype)
    weight = load_file(tmp_path / "plain/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype == {"fp32": torch.float32, "fp16": torch.float16}[dtype]


def test_a_fused_tensor_has_a_scale_for_each_row_of_its_parts(tmp_path: Path) -> None:
    given = write_model(tmp_path / "glm4", "glm4")
    megaconv.convert(given, tmp_path / "out", saver="hf", quantize="fp8-per-channel", verify=True)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    weight = load_file(given / "model.safetensors")[name].float()
    found = load_file(tmp_path / "out/model.safetensors")
    scales = weight.abs().amax(dim=1) / 448
    assert torch.equal(found[f"{name}_scale"], scales)
    expected = (weight / scales[:, None]).to(torch.float8_e4m3fn)
    assert_same(found[name].view(torch.uint8), expected.view(torch.uint8))


def test_rows_of_zeros_have_a_scale_of_one_and_any_rectangle_has_the_same_codes() -> None:
    weight = torch.randn(9, 24, generator=torch.Generator().manual_seed(5)).bfloat16()
    weight[3] = 0
    rows = Rows(as_lazy(weight), "x")
    values, scales = Fp8Values(rows, Rounding()), as_torch(RowScales(rows))
    assert scales[3] == 1
    whole = as_torch(values).view(torch.uint8)
    assert_same(in_rectangles(values, 4, 7).view(torch.uint8), whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_by_name(value: float) -> None:
    rows = Rows(as_lazy(torch.tensor([[value, 0.0]])), "layers.0.mlp.up")
    with pytest.raises(
        NotExpressible, match=r"layers\.0\.mlp\.up: holds values that are not finite"
    ):
        as_torch(RowScales(rows))
