"""ModelOpt's FP8, INT8 and INT4 checkpoints, as nvidia-modelopt 0.47 exports them: plain weights of the right values."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.engine.stream import as_lazy
from megaconv.values.quantized import dequantize
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run
from tests.values.test_quantized import as_torch, assert_same, in_rectangles

EXPORTS = FIXTURES / "modelopt-formats"
SOURCE = load_file(EXPORTS / "src/model.safetensors")
MATRICES = [name for name in SOURCE if name.endswith("_proj.weight")]
FORMATS = {
    "fp8": 0.03,
    "fp8-kv": 0.03,
    "fp8-per-channel-per-token": 0.03,
    "int8-smoothquant": 0.02,
    "int4-awq": 0.15,
    "w4a8-awq-beta": 0.15,
}
"""Export -> the largest relative error of a matrix."""
FOLDED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Matrices whose pre_quant_scale AWQ folds into the norm before them."""


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    low, high = packed & 15, packed >> 4
    codes = torch.stack([low, high], dim=1).reshape(-1, packed.shape[1]).int()
    return torch.where(codes > 7, codes - 16, codes).float()


def by_hand(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The weight of a module in float32, computed with torch."""
    codes, scale = stored[name], stored[f"{name}_scale"]
    if codes.dtype == torch.uint8:
        values = nibbles(codes)
        values *= scale.repeat_interleave(values.shape[1] // scale.shape[1], dim=1)
    else:
        values = codes.float() * (scale[:, None] if scale.dim() else scale)
    factors = stored.get(name.replace(".weight", ".pre_quant_scale"))
    return values if factors is None else values * factors.float()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("export", FORMATS)
def test_values_are_the_products_of_codes_and_scales_in_any_rectangle(
    export: str, dtype: str
) -> None:
    stored = load_file(EXPORTS / export / "model.safetensors")
    config = json.loads((EXPORTS / export / "config.json").read_text())
    tensors = {name: as_lazy(tensor) for name, tensor in stored.items()}
    found = dequantize(tensors, config, dtype, "here")
    assert found.keys() == SOURCE.keys()
    for name in MATRICES:
        expected = by_hand(stored, name).to(getattr(torch, dtype))
        assert_same(as_torch(found[name]), expected)
        assert_same(in_rectangles(found[name], 5, 7), expected)


@pytest.mark.parametrize("export", FORMATS)
def test_weights_are_near_those_that_modelopt_has_quantized(export: str, tmp_path: Path) -> None:
    outcome = run("convert", EXPORTS / export, tmp_path / "out", "--saver", "hf")
    assert outcome.status == 0, outcome.err
    found = load_file(tmp_path / "out/model.safetensors")
    norms = {
        "self_attn": "model.layers.0.input_layernorm.weight",
        "mlp": "model.layers.0.post_attention_layernorm.weight",
    }
    for name in MATRICES:
        read, expected = found[name].double(), SOURCE[name].double()
        module, matrix = name.split(".")[3:5]
        if "awq" in export and matrix in FOLDED:
            read = read * found[norms[module]].double()
            expected = expected * SOURCE[norms[module]].double()
        error = (read - expected).norm() / expected.norm()
        assert error < FORMATS[export], (name, error)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.oracle
@pytest.mark.parametrize("export", [each for each in FORMATS if each != "fp8-kv"])
def test_the_model_that_is_read_is_as_near_to_its_source_as_modelopts_own(
    export: str, tmp_path: Path
) -> None:
    """Not the same logits: ModelOpt's model rounds activations, and an AWQ export rounds q, k, v, gate and up again."""
    from transformers import AutoModelForCausalLM

    ids = load_file(EXPORTS / "calibration.safetensors")["ids"][:2]

    def logits(directory: Path) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            found: torch.Tensor = model(ids).logits
        return found

    assert run("convert", EXPORTS / export, tmp_path / "out", "--saver", "hf").status == 0
    source, theirs = logits(EXPORTS / "src"), load_file(EXPORTS / "logits.safetensors")[export]
    error = (logits(tmp_path / "out") - source).square().mean().sqrt()
    their_error = (theirs - source).square().mean().sqrt()
    assert 0 < error < 1.1 * their_error


def test_a_notice_names_the_values_that_are_left_out_and_rounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run("fingerprint", EXPORTS / "fp8-kv").status == 0
    assert "9 scales of activations are left out" in caplog.text
    assert "INT8 or INT4" not in caplog.text
    assert run("fingerprint", EXPORTS / "int4-awq").status == 0
    assert "7 weights were rounded to INT8 or INT4" in caplog.text


@pytest.mark.parametrize("export", FORMATS)
def test_the_file_beside_config_json_describes_the_weights_as_well(
    export: str, tmp_path: Path
) -> None:
    path = tmp_path / "in"
    shutil.copytree(EXPORTS / export, path)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    expected = megaconv.fingerprint(EXPORTS / export).weights
    assert megaconv.fingerprint(path).weights == expected


def damaged(path: Path, export: str, **changed: torch.Tensor | None) -> Path:
    """A copy of an export with changed tensors of layer 0's down_proj. None: without the tensor."""
    shutil.copytree(EXPORTS / export, path)
    tensors = load_file(path / "model.safetensors")
    for end, tensor in changed.items():
        name = f"model.layers.0.mlp.down_proj.{end}"
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("export", FORMATS)
def test_a_missing_scale_is_named(export: str, tmp_path: Path) -> None:
    path = damaged(tmp_path / "in", export, weight_scale=None)
    words = ["there is no model.layers.0.mlp.down_proj.weight_scale"]
    assert_refused(run("fingerprint", path), 3, *words)


@pytest.mark.parametrize(
    ("export", "scales", "expected"),
    [
        ("fp8", torch.ones(128), "one number"),
        ("fp8-per-channel-per-token", torch.ones(127), "[out] float32"),
        ("int8-smoothquant", torch.ones(()), "[out] float32"),
        ("int4-awq", torch.ones(128, 3), "[out, in / group]"),
        ("w4a8-awq-beta", torch.ones(64, 2), "[out, in / group]"),
        ("fp8", torch.ones((), dtype=torch.int32), "one number float32"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    export: str, scales: torch.Tensor, expected: str, tmp_path: Path
) -> None:
    path = damaged(tmp_path / "in", export, weight_scale=scales)
    assert_refused(run("fingerprint", path), 3, "down_proj.weight", expected)


def test_a_shorter_last_group_is_refused(tmp_path: Path) -> None:
    cut = {"weight": torch.ones(64, 192, dtype=torch.uint8), "pre_quant_scale": torch.ones(192)}
    path = damaged(tmp_path / "in", "int4-awq", **cut)
    assert_refused(run("fingerprint", path), 3, "down_proj.weight", "[out, in / group]")


def test_codes_of_another_dtype_are_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path / "in", "fp8", weight=torch.ones(128, 256, dtype=torch.int8))
    assert_refused(run("fingerprint", path), 3, "down_proj.weight", "a matrix of float8_e4m3fn")


def test_factors_of_columns_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = damaged(tmp_path / "in", "int4-awq", pre_quant_scale=torch.ones(255))
    assert_refused(run("fingerprint", path), 3, "down_proj.pre_quant_scale", "expected [256]")
