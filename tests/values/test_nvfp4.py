"""NVFP4 as nvidia-modelopt 0.47 exports it: tensors that it quantized, and what its own dequantize() makes of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.engine.stream import as_lazy
from megaconv.values.quantized import dequantize
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run
from tests.values.test_quantized import as_torch, assert_same, in_rectangles

STORED = load_file(FIXTURES / "modelopt-nvfp4/tensors.safetensors")
EXPECTED = load_file(FIXTURES / "modelopt-nvfp4/dequantized.safetensors")
MODULES = sorted(name.removesuffix(".source") for name in STORED if name.endswith(".source"))
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "ignore": ["lm_head"],
         "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16, "type": "float"}, "targets": ["Linear"]}}}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("module", MODULES)
def test_values_are_those_of_modelopt_bit_for_bit_in_any_rectangle(module: str, dtype: str) -> None:
    ends = ("weight", "weight_scale", "weight_scale_2")
    tensors = {f"x.{end}": as_lazy(STORED[f"{module}.{end}"]) for end in ends}
    (found,) = dequantize(tensors, {"quantization_config": NVFP4}, dtype, "here").values()
    assert_same(as_torch(found), EXPECTED[f"{module}.{dtype}"])
    assert_same(in_rectangles(found, 5, 7), EXPECTED[f"{module}.{dtype}"])


def quantized_model(
    target: Path, quantization: dict[str, Any] | None = None, **changed: torch.Tensor
) -> Path:
    """A Llama whose q_proj of layer 0 and down_proj of layer 1 are ModelOpt's bytes, the rest plain."""
    base = FIXTURES / "peft-llama-all-linear/base"
    config = json.loads((base / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_key_value_heads": 2}
    if quantization is not None:
        config["quantization_config"] = quantization
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    sizes = {32: 64, 56: 96, 16: 32}
    tensors = {
        name: torch.randn(
            [sizes.get(size, size) for size in tensor.shape],
            generator=torch.Generator().manual_seed(7),
        ).bfloat16()
        for name, tensor in load_file(base / "model.safetensors").items()
    }
    for module, layer in (("self_attn.q_proj", 0), ("mlp.down_proj", 1)):
        for end in ("weight", "weight_scale", "weight_scale_2"):
            tensors[f"model.layers.{layer}.{module}.{end}"] = STORED[
                f"model.layers.0.{module}.{end}"
            ]
        tensors[f"model.layers.{layer}.{module}.input_scale"] = torch.tensor(0.5)
    save_file(tensors | changed, target / "model.safetensors")
    return target


def test_a_model_of_modelopt_becomes_a_plain_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = quantized_model(tmp_path / "in", NVFP4)
    outcome = run("convert", path, tmp_path / "out", "--saver", "hf")
    assert outcome.status == 0, outcome.err
    assert "2 scales of activations are left out" in caplog.text
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(
        found["model.layers.0.self_attn.q_proj.weight"],
        EXPECTED["model.layers.0.self_attn.q_proj.bfloat16"],
    )
    assert torch.equal(
        found["model.layers.1.mlp.down_proj.weight"],
        EXPECTED["model.layers.0.mlp.down_proj.bfloat16"],
    )
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    megaconv.convert(path, tmp_path / "core", saver="core", tp=2)
    assert (
        megaconv.fingerprint(tmp_path / "core").weights
        == megaconv.fingerprint(tmp_path / "out").weights
    )


def test_the_file_that_modelopt_puts_beside_config_json_says_it_too(tmp_path: Path) -> None:
    one, other = quantized_model(tmp_path / "one", NVFP4), quantized_model(tmp_path / "other")
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (other / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
    )
    assert megaconv.fingerprint(one).weights == megaconv.fingerprint(other).weights


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({**NVFP4, "quant_algo": "NVFP4_FP8"}, ["'NVFP4_FP8'", "only NVFP4"]),
        ({**NVFP4, "quant_algo": "NVFP4_AWQ"}, ["'NVFP4_AWQ'"]),
        (
            {**NVFP4, "config_groups": {"group_0": {"weights": {"group_size": 32}}}},
            ["groups of 32", "groups of 16"],
        ),
    ],
)
def test_other_algorithms_of_modelopt_are_refused_by_name(
    quantization: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    assert_refused(run("fingerprint", quantized_model(tmp_path / "in", quantization)), 3, *words)


@pytest.mark.parametrize("shape", [(64, 5), (63, 4)])
def test_scales_of_another_shape_are_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    path = quantized_model(
        tmp_path / "in", NVFP4, **{name: torch.ones(shape).to(torch.float8_e4m3fn)}
    )
    assert_refused(
        run("fingerprint", path),
        3,
        "self_attn.q_proj.weight",
        f"{list(shape)} float8_e4m3fn",
        "expected [64, 4]",
    )


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    path = quantized_model(tmp_path / "in", NVFP4)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight_scale_2"]
    save_file(tensors, path / "model.safetensors")
    assert_refused(
        run("fingerprint", path), 3, "there is no model.layers.1.mlp.down_proj.weight_scale_2"
    )
    assert np.isfinite(EXPECTED[f"{MODULES[0]}.float32"].numpy()).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"config_groups": {"a": 5}}, "config_groups.a: should be an object, found 5"),
        ({"config_groups": {"a": {}}}, "config_groups.a.weights: is missing, expected an object"),
        (
            {"config_groups": {"a": {"weights": {"group_size": {}}}}},
            "config_groups.a.weights.group_size: should be a whole number, found {}",
        ),
        ({"group_size": []}, "group_size: should be a whole number, found []"),
    ],
    ids=str,
)
def test_settings_of_a_wrong_kind_are_named(
    settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    shutil.copytree(FIXTURES / "peft-llama-all-linear/base", tmp_path / "in")
    file = tmp_path / "in/config.json"
    quantized = {"quant_method": "modelopt", "quant_algo": "NVFP4", **settings}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantized}))
    assert_refused(run("fingerprint", tmp_path / "in"), 3, f"quantization_config.{words}")
