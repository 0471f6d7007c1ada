"""llm-compressor's checkpoints (`compressed-tensors`): FP8, INT8 and packed INT4 become plain weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaconv.engine.stream import as_lazy
from megaconv.errors import TensorMismatch
from megaconv.values.compressed_tensors import scheme_of
from megaconv.values.quantized import dequantize
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run
from tests.values.test_modelopt import EXPORTS, MATRICES, SOURCE
from tests.values.test_quantized import as_torch, assert_same, in_rectangles

Tensors = dict[str, torch.Tensor]
GOLDEN = FIXTURES / "compressed-tensors"


def settings(kind: str, bits: int, strategy: str, **changed: Any) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True} | {
        key: value
        for key, value in changed.items()
        if key in ("group_size", "symmetric", "actorder")
    }
    layout = "pack-quantized" if bits == 4 else f"{kind}-quantized"
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    found = {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}
    return found | {key: value for key, value in changed.items() if key not in weights}


SCHEMES = {
    "fp8-tensor": settings("float", 8, "tensor"),
    "fp8-channel": settings("float", 8, "channel"),
    "int8-channel": settings("int", 8, "channel"),
    "int4-channel": settings("int", 4, "channel"),
    "int4-group": settings("int", 4, "group", group_size=32),
}


def packed(codes: torch.Tensor) -> torch.Tensor:
    """[rows, cols] numbers of 4 bits -> [rows, cols / 8] int32, the lowest bits first."""
    rows, cols = codes.shape
    padded = torch.zeros(rows, -(-cols // 8) * 8, dtype=torch.int64)
    padded[:, :cols] = codes.long() + 8
    words = (padded.reshape(rows, -1, 8) << torch.arange(0, 32, 4)).sum(dim=2)
    return words.to(torch.int32)


def quantized(weight: torch.Tensor, scheme: str) -> tuple[Tensors, torch.Tensor]:
    """(the tensors of a module, its dequantized weight in float32)."""
    largest = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[scheme.split("-")[0]]
    rows, cols = weight.shape
    groups = weight.float().reshape(rows, -1, 32 if scheme == "int4-group" else cols)
    scale = groups.abs().amax(dim=2) / largest
    if scheme == "fp8-tensor":
        scale = scale.max().reshape(1)
    scale = scale.bfloat16()
    wide = scale.float().reshape(-1, 1) if scheme == "fp8-tensor" else scale.float()
    factors = wide.expand(rows, -1).repeat_interleave(cols // wide.shape[1], dim=1)
    quotients = (weight.float() / factors).clamp(-largest, largest)
    is_fp8 = scheme.startswith("fp8")
    codes = quotients.to(torch.float8_e4m3fn) if is_fp8 else quotients.round().to(torch.int8)
    stored = {"weight_scale": scale}
    if scheme.startswith("int4"):
        stored |= {"weight_packed": packed(codes), "weight_shape": torch.tensor([rows, cols])}
    else:
        stored["weight"] = codes
    return stored, codes.float() * factors


def write(path: Path, scheme: str, config: dict[str, Any] | None = None) -> Path:
    """The model of ModelOpt's fixtures with quantized matrices."""
    path.mkdir()
    shutil.copy(EXPORTS / "src/config.json", path)
    described = json.loads((path / "config.json").read_text())
    described["quantization_config"] = SCHEMES[scheme] if config is None else config
    (path / "config.json").write_text(json.dumps(described))
    tensors = {name: tensor for name, tensor in SOURCE.items() if name not in MATRICES}
    for name in MATRICES:
        module = name.removesuffix(".weight")
        stored = quantized(SOURCE[name], scheme)[0]
        tensors |= {f"{module}.{end}": tensor.contiguous() for end, tensor in stored.items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_are_the_products_of_codes_and_scales_in_any_rectangle(
    scheme: str, dtype: str
) -> None:
    columns = 96 if scheme == "int4-group" else 93
    weight = torch.randn(9, columns, generator=torch.Generator().manual_seed(3)).bfloat16()
    stored, expected = quantized(weight, scheme)
    tensors = {f"x.{end}": as_lazy(tensor) for end, tensor in stored.items()}
    config = {"quantization_config": SCHEMES[scheme]}
    (found,) = dequantize(tensors, config, dtype, "here").values()
    assert_same(as_torch(found), expected.to(getattr(torch, dtype)))
    assert_same(in_rectangles(found, 4, 7), expected.to(getattr(torch, dtype)))


@pytest.mark.parametrize(
    ("preset", "scheme"),
    [
        ("FP8", "FP8 by tensor"),
        ("FP8_DYNAMIC", "FP8 by channel"),
        ("FP8_BLOCK", "FP8 by blocks of 128 by 128"),
        ("W8A8", "INT8 by channel"),
        ("W4A16", "INT4 by groups of 128"),
        ("W4A16_CHANNEL", "INT4 by channel"),
        ("W4A16_ASYM", "asymmetric INT4 by groups of 128"),
        ("W8A16", "INT8 by groups of 128"),
        ("W8A16_ASYM", "asymmetric INT8 by channel"),
        ("W8A8_ASYM", "asymmetric INT8 by channel"),
        ("MXFP4A16", "MXFP4 by groups of 32"),
        ("MXFP8A16", "MXFP8 by groups of 32"),
        ("NVFP4A16", "NVFP4 by groups of 16"),
        ("NVFP4", "NVFP4 by groups of 16"),
    ],
)
def test_bytes_of_the_real_package_become_the_values_that_it_decompresses(
    preset: str, scheme: str
) -> None:
    """The fixture was made by compressed-tensors 0.20 and 0.20.1: its compressors, its settings, and what it decompresses."""
    described = json.loads((GOLDEN / "configs.json").read_text())[preset]
    assert scheme_of(described, "here") == scheme
    of_preset = {
        name.removeprefix(f"{preset}."): tensor
        for name, tensor in load_file(GOLDEN / "golden.safetensors").items()
        if name.startswith(f"{preset}.")
    }
    expected = of_preset.pop("decompressed")
    tensors = {f"x.{end}": as_lazy(tensor) for end, tensor in of_preset.items()}
    (found,) = dequantize(tensors, {"quantization_config": described}, "bfloat16", "here").values()
    assert_same(as_torch(found), expected)
    assert_same(in_rectangles(found, 7, 33), expected)


@pytest.mark.parametrize(
    ("preset", "shape"), [("W4A16_ASYM", (3, 2)), ("W8A16_ASYM", (2, 2)), ("W8A8_ASYM", (6, 2))]
)
def test_zero_points_that_do_not_fit_are_named(preset: str, shape: tuple[int, int]) -> None:
    described = json.loads((GOLDEN / "configs.json").read_text())[preset]
    tensors = {
        name.replace(preset, "x"): as_lazy(tensor)
        for name, tensor in load_file(GOLDEN / "golden.safetensors").items()
        if name.startswith(f"{preset}.w")
    }
    tensors["x.weight_zero_point"] = as_lazy(torch.zeros(shape, dtype=torch.int32))
    with pytest.raises(TensorMismatch, match=r"x\.weight_zero_point is"):
        dequantize(tensors, {"quantization_config": described}, "bfloat16", "here")


@pytest.mark.parametrize(
    ("scheme", "changed", "without", "words"),
    [
        ("int4-group", {"symmetric": False}, (), r"there is no x\.weight_zero_point"),
        ("int8-channel", {"symmetric": False}, (), r"there is no x\.weight_zero_point"),
        ("int4-group", {}, ("weight_scale",), r"there is no x\.weight_scale"),
        ("int8-channel", {}, ("weight_scale",), r"there is no x\.weight_scale"),
        ("int4-group", {}, ("weight_packed",), r"there is no x\.weight_packed"),
        ("int8-channel", {}, ("weight",), r"there is no x\.weight_packed"),
    ],
)
def test_a_part_that_the_settings_ask_for_is_not_left_out(
    scheme: str, changed: dict[str, Any], without: tuple[str, ...], words: str
) -> None:
    stored, _ = quantized(torch.ones(8, 64), scheme)
    tensors = {f"x.{end}": as_lazy(stored[end]) for end in stored if end not in without}
    described = json.loads(json.dumps(SCHEMES[scheme]))
    described["config_groups"]["group_0"]["weights"] |= changed
    with pytest.raises(TensorMismatch, match=words):
        dequantize(tensors, {"quantization_config": described}, "bfloat16", "here")


def test_two_forms_of_one_weight_are_refused() -> None:
    stored, expected = quantized(torch.ones(8, 64), "int4-channel")
    tensors = {f"x.{end}": as_lazy(tensor) for end, tensor in stored.items()}
    tensors["x.weight"] = as_lazy(expected)
    config = {"quantization_config": SCHEMES["int4-channel"]}
    with pytest.raises(TensorMismatch, match=r"holds x\.weight and x\.weight_packed, two forms"):
        dequantize(tensors, config, "bfloat16", "here")


def test_groups_with_formats_of_their_own_are_read_together() -> None:
    """llm-compressor calls it mixed-precision: INT4 and NVFP4 in one model."""
    described = json.loads((GOLDEN / "configs.json").read_text())
    stored = load_file(GOLDEN / "golden.safetensors")
    presets = ("W4A16", "NVFP4A16", "MXFP8A16")
    groups = {name: described[name]["config_groups"]["group_0"] for name in presets}
    for name in presets:
        groups[name]["format"] = described[name]["format"]
    mixed = {**described["W4A16"], "format": "mixed-precision", "config_groups": groups}
    assert scheme_of(mixed, "here") == (
        "INT4 by groups of 128, MXFP8 by groups of 32, NVFP4 by groups of 16"
    )
    tensors = {
        name: as_lazy(tensor)
        for name, tensor in stored.items()
        if name.startswith(tuple(f"{preset}.w" for preset in presets))
    }
    found = dequantize(tensors, {"quantization_config": mixed}, "bfloat16", "here")
    assert found.keys() == {f"{preset}.weight" for preset in presets}
    for preset in presets:
        assert_same(as_torch(found[f"{preset}.weight"]), stored[f"{preset}.decompressed"])


@pytest.mark.parametrize(
    ("end", "tensor", "words"),
    [
        ("weight_scale", torch.ones(13, 8).to(torch.float8_e4m3fn), r"with \[13, 16\] scales"),
        ("weight_packed", torch.zeros(13, 128), r"weight_packed is .* expected a matrix of uint8"),
        ("weight_global_scale", torch.ones(2), r"weight_global_scale is \[2\]"),
        ("weight_global_scale", None, r"with \[13, 8\] scales of uint8"),
        ("weight_packed", None, r"there is no x\.weight_packed"),
    ],
)
def test_parts_of_nvfp4_that_do_not_fit_are_named(
    end: str, tensor: torch.Tensor | None, words: str
) -> None:
    described = json.loads((GOLDEN / "configs.json").read_text())["NVFP4A16"]
    stored = {
        name.replace("NVFP4A16", "x"): part
        for name, part in load_file(GOLDEN / "golden.safetensors").items()
        if name.startswith("NVFP4A16.w") and not name.endswith(end)
    }
    if tensor is not None:
        stored[f"x.{end}"] = tensor
    tensors = {name: as_lazy(part) for name, part in stored.items()}
    with pytest.raises(TensorMismatch, match=words):
        dequantize(tensors, {"quantization_config": described}, "bfloat16", "here")


def test_scales_of_mxfp4_that_do_not_fit_are_named() -> None:
    described = json.loads((GOLDEN / "configs.json").read_text())["MXFP4A16"]
    codes = as_lazy(torch.zeros(2, 32, dtype=torch.uint8))
    tensors = {"x.weight_packed": codes, "x.weight_scale": codes}
    with pytest.raises(TensorMismatch, match=r"x\.weight_packed is .* with \[2, 2\] scales"):
        dequantize(tensors, {"quantization_config": described}, "bfloat16", "here")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_becomes_a_plain_one(scheme: str, tmp_path: Path) -> None:
    outcome = run("convert", write(tmp_path / "in", scheme), tmp_path / "out", "--saver", "hf")
    assert outcome.status == 0, outcome.err
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == SOURCE.keys()
    for name in MATRICES:
        assert torch.equal(found[name], quantized(SOURCE[name], scheme)[1].bfloat16()), name
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_a_report_of_the_share_of_zeros_changes_nothing(tmp_path: Path) -> None:
    """llm-compressor wrote it until 2025, also for models that leave out no zeros."""
    report = {
        "format": "dense",
        "global_sparsity": 0.1463,
        "ignore": [],
        "registry_requires_subclass": False,
        "sparsity_structure": "unstructured",
    }
    config = SCHEMES["int8-channel"] | {"sparsity_config": report}
    outcome = run("convert", write(tmp_path / "in", "int8-channel", config), tmp_path / "out", "--saver", "hf")  # fmt: skip
    assert outcome.status == 0, outcome.err
    found = load_file(tmp_path / "out/model.safetensors")
    for name in MATRICES:
        expected = quantized(SOURCE[name], "int8-channel")[1].bfloat16()
        assert torch.equal(found[name], expected), name


CACHE = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
ATTENTION = {"targets": ["LlamaAttention"], "weights": None, "input_activations": CACHE}


@pytest.mark.parametrize("groups", [{}, {"group_0": ATTENTION}])
def test_a_model_with_a_quantized_cache_alone_has_plain_weights(
    groups: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "in"
    path.mkdir()
    config = json.loads((EXPORTS / "src/config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": groups,
        "kv_cache_scheme": CACHE,
        "sparsity_config": {},
    }
    (path / "config.json").write_text(json.dumps(config))
    attention = "model.layers.0.self_attn"
    beside = {f"{attention}.{kind}_scale": torch.tensor([0.5]) for kind in ("q", "k", "v")}
    beside[f"{attention}.k_zero_point"] = torch.zeros(1, dtype=torch.int8)
    save_file(SOURCE | beside, path / "model.safetensors")
    outcome = run("convert", path, tmp_path / "out", "--saver", "hf")
    assert outcome.status == 0, outcome.err
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == SOURCE.keys()
    for name, tensor in SOURCE.items():
        assert torch.equal(found[name], tensor), name


def test_groups_of_activations_do_not_hide_the_groups_of_weights(tmp_path: Path) -> None:
    config = json.loads(json.dumps(SCHEMES["int4-group"]))
    config["config_groups"]["group_1"] = ATTENTION
    outcome = run("inspect", write(tmp_path / "in", "int4-group", config))
    assert "compressed-tensors (INT4 by groups of 32)" in outcome.out


def test_inspect_names_the_scheme(tmp_path: Path) -> None:
    outcome = run("inspect", write(tmp_path / "in", "int4-group"))
    assert "compressed-tensors (INT4 by groups of 32)" in outcome.out
    outcome = run("inspect", write(tmp_path / "fp8", "fp8-channel"))
    assert "compressed-tensors (FP8 by channel)" in outcome.out


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (settings("float", 8, "channel", symmetric=False), "asymmetric numbers"),
        (settings("int", 4, "group", group_size=32, actorder="group"), "in another order"),
        (settings("float", 4, "group", group_size=32), "float of 4 bits"),
        (
            settings("int", 4, "group", group_size=32, format="mxfp4-pack-quantized"),
            "int of 4 bits",
        ),
        (
            settings("float", 4, "group", group_size=16, format="mxfp4-pack-quantized"),
            "MXFP4 by group, group_size 16",
        ),
        (
            settings("float", 4, "tensor_group", group_size=32, format="nvfp4-pack-quantized"),
            "NVFP4 by tensor_group, group_size 32",
        ),
        (settings("float", 8, "channel", format="mxfp8-quantized"), "MXFP8 by channel"),
        (settings("float", 8, "channel", format="mixed-precision"), "group_0.format: is missing"),
        (settings("float", 8, "attn_head"), "strategy 'attn_head'"),
        (settings("int", 4, "channel", transform_config={"a": 1}), "rotated weights"),
        (
            settings("int", 8, "channel", transform_config={"a": 1}, config_groups={}),
            "rotated weights",
        ),
        (
            settings("int", 4, "channel", sparsity_config={"format": "sparse-24-bitmask"}),
            "sparse weights",
        ),
        (settings("int", 4, "channel", sparsity_config={"targets": []}), "sparse weights"),
        (settings("int", 4, "channel", sparsity_config="dense"), "quantization_config"),
        (settings("int", 4, "channel", format="marlin-24"), "format 'marlin-24'"),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
    ],
)
def test_other_schemes_are_refused_by_name(
    config: dict[str, Any], word: str, tmp_path: Path
) -> None:
    assert_refused(run("fingerprint", write(tmp_path / "in", "int4-group", config)), 3, word)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_bits", "4", "num_bits: should be a whole number, found '4'"),
        ("symmetric", None, "symmetric: should be true or false, found None"),
        ("group_size", [32], "group_size: should be a whole number, found [32]"),
    ],
)
def test_a_setting_of_a_wrong_kind_is_named_with_its_keys(
    key: str, value: object, words: str, tmp_path: Path
) -> None:
    config = json.loads(json.dumps(SCHEMES["int4-group"]))
    name, group = next(iter(config["config_groups"].items()))
    group["weights"][key] = value
    found = run("inspect", write(tmp_path / "model", "int4-group", config), "--stats")
    assert_refused(found, 3, f"quantization_config.config_groups.{name}.weights.{words}")


@pytest.mark.parametrize(
    ("end", "tensor", "words"),
    [
        ("weight_scale", None, ["there is no", "down_proj.weight_scale"]),
        ("weight_shape", None, ["there is no", "down_proj.weight_shape"]),
        ("weight_scale", torch.ones(128, 16), ["down_proj.weight is", "[out, in / group]"]),
        ("weight_shape", torch.tensor([128, 300]), ["weight of [128, 300]", "expected int32"]),
        ("weight_shape", torch.ones(2), ["expected [2] int64"]),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    end: str, tensor: torch.Tensor | None, words: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "in", "int4-group")
    tensors = load_file(path / "model.safetensors")
    name = f"model.layers.0.mlp.down_proj.{end}"
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    assert_refused(run("fingerprint", path), 3, *words)
