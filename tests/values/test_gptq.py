"""GPTQ's and AWQ's checkpoints: integers of 4 or 8 bits in words, in groups of inputs, become plain weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.engine.stream import as_lazy
from megaconv.errors import CorruptCheckpoint, TensorMismatch, UnsupportedInput
from megaconv.values.quantized import dequantize
from tests.conftest import FIXTURES
from tests.runs import assert_refused, run
from tests.values.test_modelopt import EXPORTS, MATRICES, SOURCE
from tests.values.test_quantized import as_torch, assert_same, in_rectangles

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The numbers of a word, from the lowest bits on."""
GROUP = 16


def gptq(**changed: Any) -> dict[str, Any]:
    return {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": False,
        }
        | changed
    }


def awq(**changed: Any) -> dict[str, Any]:
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    return {"quantization_config": settings | changed}


def words(numbers: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """[rows, cols] numbers -> [rows, cols * bits / 32] int32, each word with the numbers of a row."""
    per_word = 32 // bits
    each = numbers.long().reshape(numbers.shape[0], -1, per_word)
    if order is not None:
        each = each[:, :, order]
    joined = (each << torch.arange(0, 32, bits)).sum(dim=2)
    return joined.to(torch.uint32).view(torch.int32)


def column_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    return words(numbers.T.contiguous(), bits).T.contiguous()


def quantized(weight: torch.Tensor, config: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """(the tensors of a module, its dequantized weight [out, in] in float32)."""
    settings = config["quantization_config"]
    bits, largest = settings["bits"], 2 ** settings["bits"] - 1
    inputs = weight.shape[1]
    group = inputs if settings["group_size"] == -1 else settings["group_size"]
    groups = torch.arange(inputs) // group
    if settings.get("desc_act"):
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(5))]
    rows = weight.float().T
    low = torch.stack([rows[groups == one].amin(dim=0) for one in range(int(groups.max()) + 1)])
    high = torch.stack([rows[groups == one].amax(dim=0) for one in range(int(groups.max()) + 1)])
    scales = ((high - low) / largest).half()
    zeros = (-low / scales.float()).round().clamp(1, largest).int()
    numbers = (rows / scales.float()[groups] + zeros[groups]).round().clamp(0, largest).int()
    expected = (numbers - zeros[groups]).float() * scales.float()[groups]
    if settings["quant_method"] == "awq":
        stored = {"qweight": words(numbers, 4, AWQ_ORDER), "qzeros": words(zeros, 4, AWQ_ORDER)}
    else:
        less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
        stored = {
            "qweight": column_words(numbers, bits),
            "qzeros": words(zeros - less, bits),
            "g_idx": groups.int(),
        }
    return stored | {"scales": scales}, expected.T.contiguous()


CONFIGS = {
    "gptq": gptq(),
    "gptq of version 2": gptq(checkpoint_format="gptq_v2"),
    "gptq of 8 bits": gptq(bits=8),
    "gptq with inputs in another order": gptq(desc_act=True),
    "gptq with one group": gptq(group_size=-1),
    "awq": awq(),
    "awq as transformers 5 writes it": awq(version=None, format="gemm"),
}


def matrix() -> torch.Tensor:
    return torch.randn(24, 64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_the_products_of_numbers_and_scales_in_any_rectangle(
    name: str, dtype: str
) -> None:
    stored, expected = quantized(matrix(), CONFIGS[name])
    tensors = {f"x.{end}": as_lazy(tensor) for end, tensor in stored.items()}
    tensors["x.bias"] = as_lazy(torch.ones(24))
    found = dequantize(tensors, CONFIGS[name], dtype, "here")
    assert found.keys() == {"x.weight", "x.bias"}
    weight = found["x.weight"]
    rounded = expected.to(getattr(torch, dtype))
    assert_same(as_torch(weight), rounded)
    for height, width in ((1, 64), (5, 7), (24, 1), (3, 33)):
        assert_same(in_rectangles(weight, height, width), rounded)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gptq", gptq(group_size=32)),
        ("gptq_v2", gptq(group_size=32, checkpoint_format="gptq_v2")),
        ("gptq_act", gptq(group_size=32, desc_act=True)),
        ("gptq_8", gptq(group_size=32, bits=8)),
        ("awq", awq(group_size=32)),
    ],
)
def test_matrices_of_gptqmodel_have_the_values_that_its_makers_read(
    name: str, config: dict[str, Any]
) -> None:
    """GPTQModel 7.7 packed them; it and AutoAWQ 0.2.9 computed the weights, with scales in float32."""
    stored = load_file(FIXTURES / "gptq-awq/golden.safetensors")
    parts = {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in stored.items()
        if key.startswith(f"{name}.")
    }
    expected = parts.pop("expected")
    tensors = {f"x.{end}": as_lazy(tensor) for end, tensor in parts.items()}
    found = dequantize(tensors, config, "float32", "here")
    assert_same(as_torch(found["x.weight"]), expected)


def test_groups_of_neighbors_need_no_index() -> None:
    stored, expected = quantized(matrix(), gptq())
    del stored["g_idx"]
    tensors = {f"x.{end}": as_lazy(tensor) for end, tensor in stored.items()}
    found = dequantize(tensors, gptq(), "float32", "here")
    assert_same(as_torch(found["x.weight"]), expected)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (gptq(bits=3), "gptq in the layout gptq with 3 bits; supported are gptq and gptq_v2"),
        (gptq(checkpoint_format="marlin"), "in the layout marlin with 4 bits"),
        (awq(version="GEMV"), "awq in the layout gemv with 4 bits; supported are gemm with 4 bits"),
        (awq(bits=8), "awq in the layout gemm with 8 bits"),
        (awq(backend="llm-awq"), "awq in the layout llm-awq"),
        (gptq(rotation="hadamard"), "with rotation 'hadamard': a layer turns its inputs"),
    ],
)
def test_other_layouts_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedInput, match=words):
        dequantize({}, config, None, "here")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            gptq(checkpoint_format="gptq", format="gptq_v2"),
            "names two layouts: checkpoint_format gptq and format gptq_v2",
        ),
        (awq(format="gemv"), "names two layouts: version gemm and format gemv"),
    ],
)
def test_two_layouts_in_one_file_are_refused(config: dict[str, Any], words: str) -> None:
    """transformers takes the first, GPTQModel the second."""
    with pytest.raises(CorruptCheckpoint, match=words):
        dequantize({}, config, None, "here")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("bits", "4", r"quantization_config.bits: should be a whole number, found '4'"),
        ("group_size", None, r"quantization_config.group_size: should be a whole number"),
    ],
)
def test_a_setting_of_a_wrong_kind_is_named(key: str, value: object, words: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=words):
        dequantize({}, gptq(**{key: value}), None, "here")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gptq", {"scales": None}, "there is no x.scales"),
        ("gptq", {"qzeros": None}, "there is no x.qzeros"),
        ("gptq", {"qweight": None}, "there is no x.qweight"),
        ("awq", {"qweight": None}, "there is no x.qweight"),
        ("gptq", {"qweight": torch.zeros(8, 24)}, r"expected int32 with floats \[groups, 24\]"),
        ("gptq", {"qzeros": torch.zeros(4, 4, dtype=torch.int32)}, r"x.qzeros is \[4, 4\] int32; expected \[4, 3\] int32"),
        ("gptq", {"g_idx": torch.zeros(63, dtype=torch.int32)}, r"x.g_idx is \[63\] int32; expected \[64\] int32"),
        ("gptq", {"g_idx": None, "scales": torch.ones(3, 24), "qzeros": torch.zeros(3, 3, dtype=torch.int32)},
         "scales of 3 groups for 64 inputs in groups of 16"),
        ("gptq with inputs in another order", {"g_idx": None}, "there is no x.g_idx"),
        ("gptq", {"weight": torch.zeros(24, 64)}, "holds x.weight and x.qweight, two forms of one weight"),
        ("awq", {"weight": torch.zeros(24, 64)}, "holds x.weight and x.qweight, two forms of one weight"),
        ("awq", {"scales": torch.ones(4, 24, dtype=torch.int32)}, r"expected int32 with floats \[groups, 24\]"),
        ("awq", {"qweight": torch.zeros(32, 3, dtype=torch.int32)}, "scales of 4 groups for 32 inputs in groups of 16"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(
    name: str, change: dict[str, torch.Tensor | None], words: str
) -> None:
    stored, _ = quantized(matrix(), CONFIGS[name])
    parts = {end: tensor for end, tensor in {**stored, **change}.items() if tensor is not None}
    tensors = {f"x.{end}": as_lazy(tensor) for end, tensor in parts.items()}
    with pytest.raises(TensorMismatch, match=words):
        dequantize(tensors, CONFIGS[name], None, "here")


@pytest.mark.parametrize("group", [-1, 4])
def test_an_index_of_a_group_without_scales_is_refused(group: int) -> None:
    stored, _ = quantized(matrix(), gptq())
    stored["g_idx"][5] = group
    tensors = {f"x.{end}": as_lazy(tensor) for end, tensor in stored.items()}
    weight = dequantize(tensors, gptq(), None, "here")["x.weight"]
    with pytest.raises(TensorMismatch, match=r"here: x.g_idx: names group .* scales of 4 groups"):
        as_torch(weight)


def write(path: Path, config: dict[str, Any]) -> Path:
    """The model of ModelOpt's fixtures with quantized matrices."""
    path.mkdir()
    described = json.loads((EXPORTS / "src/config.json").read_text())
    (path / "config.json").write_text(json.dumps(described | config))
    tensors = {name: tensor for name, tensor in SOURCE.items() if name not in MATRICES}
    for name in MATRICES:
        module = name.removesuffix(".weight")
        stored, _ = quantized(SOURCE[name], config)
        tensors |= {f"{module}.{end}": tensor.contiguous() for end, tensor in stored.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


OLDER_FILES = {
    "gptq": ("quantize_config.json", {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "awq": ("quant_config.json", {"w_bit": 4, "q_group_size": GROUP, "version": "GEMM", "zero_point": True}),
}  # fmt: skip
"""What AutoGPTQ and AutoAWQ wrote beside a config.json without quantization_config."""


@pytest.mark.parametrize("name", OLDER_FILES)
def test_settings_in_a_file_of_their_own_are_read(name: str, tmp_path: Path) -> None:
    method = {"gptq": gptq(), "awq": awq()}[name]
    expected = megaconv.fingerprint(write(tmp_path / "plain", method))
    older = write(tmp_path / "older", method)
    config = json.loads((older / "config.json").read_text())
    del config["quantization_config"]
    (older / "config.json").write_text(json.dumps(config))
    with pytest.raises(TensorMismatch, match="qweight"):
        megaconv.fingerprint(older)
    file, settings = OLDER_FILES[name]
    (older / file).write_text(json.dumps(settings))
    assert megaconv.fingerprint(older) == expected
    megaconv.convert(older, tmp_path / "out", saver="hf")
    assert not (tmp_path / "out" / file).exists()
    (older / file).write_text("[]")
    with pytest.raises(CorruptCheckpoint, match=file):
        megaconv.fingerprint(older)


def with_biases(path: Path, value: float) -> Path:
    """The model with a bias beside each quantized matrix, as AutoGPTQ stores one for every model."""
    stored = load_file(path / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    for module in modules:
        rows = stored[f"{module}.scales"].shape[1]
        stored[f"{module}.bias"] = torch.full((rows,), value, dtype=torch.float16)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", gptq())
    biased = with_biases(write(tmp_path / "biased", gptq()), 0.0)
    assert megaconv.fingerprint(biased) == megaconv.fingerprint(plain)


def test_biases_of_zeros_stay_where_the_model_has_biases(tmp_path: Path) -> None:
    """A Llama with attention_bias has those of attention, and not those of its MLP."""
    biased = with_biases(write(tmp_path / "biased", gptq() | {"attention_bias": True}), 0.0)
    megaconv.convert(biased, tmp_path / "hf", saver="hf")
    found = {name for name in load_file(tmp_path / "hf/model.safetensors") if name.endswith("bias")}
    assert found == {f"model.layers.0.self_attn.{kind}_proj.bias" for kind in "qkvo"}


def test_biases_of_other_numbers_are_no_part_of_a_model_without_biases(tmp_path: Path) -> None:
    biased = with_biases(write(tmp_path / "biased", gptq()), 0.5)
    with pytest.raises(TensorMismatch, match=r"7 tensors are unknown .*mlp\.down_proj\.bias"):
        megaconv.fingerprint(biased)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_quantized_model_becomes_a_megatron_checkpoint_and_a_plain_model(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write(tmp_path / "quantized", CONFIGS[name])
    outcome = run(
        "convert", source, tmp_path / "core", "--saver", "core", "--tp", 2, "--dtype", "fp32"
    )
    assert outcome.status == 0, outcome.err
    assert f"{len(MATRICES)} weights were rounded to 4 bits before" in caplog.text
    megaconv.convert(tmp_path / "core", tmp_path / "plain", saver="hf", verify=True)
    found = {
        key: tensor
        for file in (tmp_path / "plain").glob("*.safetensors")
        for key, tensor in load_file(file).items()
    }
    assert found.keys() == SOURCE.keys()
    for matrix_name in MATRICES:
        _, expected = quantized(SOURCE[matrix_name], CONFIGS[name])
        assert torch.equal(found[matrix_name], expected)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_inspect_names_the_method_and_its_width(name: str, tmp_path: Path) -> None:
    outcome = run("inspect", write(tmp_path / "quantized", CONFIGS[name]))
    assert f"hf, safetensors, {name} (4 bits)" in outcome.out


def test_a_model_with_a_damaged_index_leaves_no_output(tmp_path: Path) -> None:
    source = write(tmp_path / "quantized", gptq())
    tensors = load_file(source / "model.safetensors")
    name = MATRICES[0].replace(".weight", ".g_idx")
    tensors[name][0] = 99
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    outcome = run("convert", source, tmp_path / "out", "--saver", "core")
    assert_refused(outcome, outcome.status, f"{name}: names group 99")
    assert not (tmp_path / "out").exists()
