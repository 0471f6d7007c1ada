"""ModelOpt's checkpoints with an algorithm for each layer: every weight has the value that its own algorithm gives it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.engine.stream import as_lazy
from megaconv.errors import TensorMismatch
from megaconv.values.quantized import dequantize
from tests.runs import assert_refused, run
from tests.values.test_modelopt import EXPORTS, MATRICES, SOURCE, by_hand
from tests.values.test_nvfp4 import EXPECTED, MODULES, STORED
from tests.values.test_quantized import as_torch, assert_same

ALGORITHMS = {
    "self_attn.q_proj": "fp8",
    "self_attn.k_proj": "fp8-per-channel-per-token",
    "mlp": "int4-awq",
}
"""Module -> ModelOpt's export of the model from which its tensors come. The others are plain."""
NAMES = {
    "fp8": "FP8",
    "fp8-per-channel-per-token": "FP8_PER_CHANNEL_PER_TOKEN",
    "int4-awq": "W4A16_AWQ",
}


def mixed(layers: dict[str, Any]) -> dict[str, Any]:
    """The settings that convert_hf_quant_config_format of nvidia-modelopt 0.47 writes, without its groups."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.47.0"},
    }


def write(path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """(a model with a form for each module, the values of its quantized matrices in float32)."""
    exports = {each: load_file(EXPORTS / each / "model.safetensors") for each in NAMES}
    stored = {name: tensor for name, tensor in SOURCE.items() if name not in MATRICES}
    layers, meant = {}, {}
    for name in MATRICES:
        module = name.removesuffix(".weight")
        within = module.split(".", 3)[3]
        export = ALGORITHMS.get(within) or ALGORITHMS.get(within.split(".")[0])
        if export is None:
            stored[name] = SOURCE[name]
            continue
        of_export = exports[export]
        meant[name] = by_hand(of_export, name)
        stored |= {each: of_export[each] for each in of_export if each.startswith(f"{module}.")}
        entry = module if within in ALGORITHMS else module.rpartition(".")[0]
        layers[entry] = {"quant_algo": NAMES[export], "group_size": 128}
    path.mkdir()
    shutil.copy(EXPORTS / "src/config.json", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": mixed(layers)}))
    save_file({each: tensor.contiguous() for each, tensor in stored.items()}, path / "model.safetensors")  # fmt: skip
    return path, meant


def test_each_module_has_the_values_of_its_own_algorithm(tmp_path: Path) -> None:
    model, meant = write(tmp_path / "in")
    assert len(meant) == 5
    megaconv.convert(model, tmp_path / "core", saver="core", tp=2)
    megaconv.convert(tmp_path / "core", tmp_path / "hf", saver="hf")
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == SOURCE.keys()
    for name, tensor in SOURCE.items():
        assert_same(found[name], meant.get(name, tensor).bfloat16())


def test_nvfp4_beside_fp8_is_what_modelopt_makes_of_it() -> None:
    tensors = {f"x.{end}": STORED[f"{MODULES[0]}.{end}"] for end in ("weight", "weight_scale", "weight_scale_2")}  # fmt: skip
    tensors["y.weight"] = torch.arange(256).byte().reshape(8, 32).view(torch.float8_e4m3fn)
    tensors["y.weight_scale"], tensors["y.input_scale"] = torch.tensor(0.5), torch.tensor(3.0)
    layers = {"x": {"quant_algo": "NVFP4", "group_size": 16}, "y": {"quant_algo": "FP8"}}
    lazy = {name: as_lazy(tensor) for name, tensor in tensors.items()}
    found = dequantize(lazy, {"quantization_config": mixed(layers)}, "bfloat16", "here")
    assert found.keys() == {"x.weight", "y.weight"}
    assert_same(as_torch(found["x.weight"]), EXPECTED[f"{MODULES[0]}.bfloat16"])
    assert_same(as_torch(found["y.weight"]), (tensors["y.weight"].float() * 0.5).bfloat16())


def test_inspect_names_all_algorithms(tmp_path: Path) -> None:
    outcome = run("inspect", write(tmp_path / "in")[0])
    assert "modelopt (FP8, FP8_PER_CHANNEL_PER_TOKEN, W4A16_AWQ)" in outcome.out


def test_a_quantized_weight_without_an_entry_is_refused() -> None:
    tensors = {"x.weight": as_lazy(torch.zeros(4, 4).to(torch.float8_e4m3fn))}
    for settings in (mixed({}), {"quant_method": "modelopt"}):
        with pytest.raises(TensorMismatch, match=r"x\.weight is float8_e4m3fn, and no entry"):
            dequantize(tensors, {"quantization_config": settings}, None, "here")


def test_a_quantized_cache_alone_leaves_the_weights_plain() -> None:
    cache = {"dynamic": False, "num_bits": 8, "type": "float"}
    settings = {"quant_method": "modelopt", "ignore": [], "kv_cache_scheme": cache}
    weight = torch.ones(4, 4)
    tensors = {"x.weight": as_lazy(weight), "x.k_scale": as_lazy(torch.tensor(1.0))}
    found = dequantize(tensors, {"quantization_config": settings}, None, "here")
    assert found.keys() == {"x.weight"}
    assert_same(as_torch(found["x.weight"]), weight)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"x": {"quant_algo": "NVFP4_AWQ", "group_size": 16}}, "NVFP4_AWQ"),
        ({"x": {"quant_algo": "NVFP4", "group_size": 32}}, "groups of 32"),
        ({"x": {}}, "quantized_layers.x.quant_algo: is missing"),
        ({"x": "FP8"}, "quantized_layers.x: should be an object, found 'FP8'"),
        ("FP8", "quantized_layers: should be an object, found 'FP8'"),
    ],
)
def test_other_algorithms_and_wrong_kinds_are_named(
    layers: Any, words: str, tmp_path: Path
) -> None:
    model, _ = write(tmp_path / "in")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["quantized_layers"] = layers
    (model / "config.json").write_text(json.dumps(config))
    assert_refused(run("fingerprint", model), 3, words)
