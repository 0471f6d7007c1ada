"""`--quantize w4a16` and `w8a16`: compressed-tensors' own bytes, and that what is written is read."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import megaconv
from formats.tensor import Box
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible, UsageError
from megaconv.values.code_tensors import Rounding
from megaconv.values.grouped_integers import Groups, PackedCodes, PackedScales
from tests.conftest import FIXTURES
from tests.families.test_families import write_model
from tests.families.test_published_models import write_sparse
from tests.models import write_llama
from tests.values.test_quantized import as_torch, assert_same, in_rectangles

GOLDEN = FIXTURES / "compressed-tensors"


def quantized(weight: torch.Tensor, bits: int, size: int) -> tuple[PackedCodes, PackedScales]:
    groups = Groups(as_lazy(weight), "x", bits, size)
    return PackedCodes(groups, Rounding()), PackedScales(groups)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_byte_is_the_one_that_the_real_package_makes_of_the_same_weight(
    bits: int, dtype: str
) -> None:
    """The fixture was made by calculate_qparams and compress of compressed-tensors 0.20, in groups of 64.

    It has a row of zeros, rows of tiny and of large numbers, and one of negative numbers alone.
    """
    kind = f"w{bits}a16.{dtype}."
    golden = {
        name.removeprefix(kind): tensor
        for name, tensor in load_file(GOLDEN / "written.safetensors").items()
        if name.startswith(kind)
    }
    codes, scales = quantized(golden["source"], bits, 64)
    assert_same(as_torch(codes), golden["weight_packed"])
    assert_same(as_torch(scales), golden["weight_scale"])
    assert_same(in_rectangles(codes, 4, 3), golden["weight_packed"])
    assert_same(in_rectangles(scales, 5, 1), golden["weight_scale"])


@pytest.mark.parametrize("box", [Box(0, 3, 0, 16), Box(1, 2, 3, 13), Box(2, 3, 9, 10)])
def test_fingerprinted_values_equal_those_that_a_reader_gets_in_any_rectangle(box: Box) -> None:
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    codes, scales = quantized(weight, 4, 32)
    stored = np.empty((box.rows, 4 * box.cols), np.uint8)
    read = codes.read_both(box, stored)
    numbers = [
        [(word >> place & 15) - 8 for word in row for place in range(0, 32, 4)]
        for row in as_torch(codes).tolist()
    ]
    factors = as_torch(scales).float().repeat_interleave(32, dim=1)
    expected = (torch.tensor(numbers).float() * factors).bfloat16()
    wanted = expected[box.row0 : box.row1, 8 * box.col0 : 8 * box.col1].contiguous()
    np.testing.assert_array_equal(read, wanted.view(torch.uint8).numpy())


@pytest.mark.parametrize(("bits", "dtype"), [(4, "float16"), (4, "bfloat16"), (8, "float32")])
def test_a_value_that_would_be_read_as_infinity_is_refused_by_name(bits: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    weight = torch.arange(32, dtype=kind).reshape(1, 32)
    weight[0, 3] = torch.finfo(kind).min
    codes, _ = quantized(weight, bits, 32)
    words = f"x: holds a value near the largest of {dtype}, which INT{bits} would round to infinity"
    with pytest.raises(NotExpressible, match=words):
        as_torch(codes)
    # The highest code is nearer to zero.
    weight[0, 3] = torch.finfo(kind).max
    kept, _ = quantized(weight, bits, 32)
    as_torch(kept)
    assert np.isfinite(kept.errors.largest)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_by_name(value: float) -> None:
    codes, _ = quantized(torch.tensor([[value] + [0.0] * 31]), 4, 32)
    with pytest.raises(NotExpressible, match="x: holds values that are not finite, which INT4"):
        as_torch(codes)


@pytest.mark.parametrize(
    ("quantize", "group", "named"),
    [("w4a16", None, "INT4 by groups of 128"), ("w8a16", "64", "INT8 by groups of 64")],
)
def test_a_model_has_the_names_and_settings_of_the_real_package_and_is_read_as_its_record_says(
    quantize: str, group: str | None, named: str, tmp_path: Path
) -> None:
    write_llama(tmp_path / "hf", hidden=128, ffn=200, layers=2)
    given: dict[str, Any] = {"options": {"group_size": group}} if group else {}
    report = megaconv.convert(
        tmp_path / "hf", tmp_path / "out", saver="hf", quantize=quantize, verify=True, **given
    )
    plain, found = (load_file(tmp_path / each / "model.safetensors") for each in ("hf", "out"))
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    name = "model.layers.1.mlp.gate_proj"
    per_word = 8 if quantize == "w4a16" else 4
    size = int(group or 128)
    assert found[f"{name}.weight_packed"].shape == (200, 128 // per_word)
    assert found[f"{name}.weight_scale"].shape == (200, 128 // size)
    assert found[f"{name}.weight_shape"].tolist() == [200, 128]
    assert f"{name}.weight" not in found
    # 200 columns are no whole groups.
    down = "model.layers.1.mlp.down_proj"
    assert torch.equal(found[f"{down}.weight"], plain[f"{down}.weight"])
    assert down in config["ignore"]
    assert "lm_head" in config["ignore"]
    expected = json.loads((GOLDEN / "configs.json").read_text())[quantize.upper()]
    expected["config_groups"]["group_0"]["weights"]["group_size"] = size
    expected["config_groups"]["group_0"]["format"] = "pack-quantized"
    expected |= {"quantization_status": "compressed", "ignore": config["ignore"]}
    del expected["moe_sparsity_config"]
    assert config == expected
    assert report.fingerprint is not None
    assert megaconv.fingerprint(tmp_path / "out").weights == report.fingerprint.weights
    assert megaconv.verify(tmp_path / "out").same
    header = megaconv.inspect(tmp_path / "out").header
    assert header.source == f"hf, safetensors, compressed-tensors ({named})"
    core = megaconv.convert(tmp_path / "out", tmp_path / "core", saver="core", tp=2)
    assert core.fingerprint is not None
    assert core.fingerprint.weights == report.fingerprint.weights


def test_experts_alone_are_quantized_as_in_kimi_k2_thinking(tmp_path: Path) -> None:
    write_model(
        tmp_path / "hf", "deepseek_v3", hidden_size=64, moe_intermediate_size=32,
        q_lora_rank=32, kv_lora_rank=32,
    )  # fmt: skip
    megaconv.convert(tmp_path / "hf", tmp_path / "core", saver="core", tp=2, ep=2)
    megaconv.convert(
        tmp_path / "core",
        tmp_path / "out",
        saver="hf",
        quantize="w4a16",
        options={"group_size": "32", "modules": "experts"},
        verify=True,
    )
    found = load_file(tmp_path / "out/model.safetensors")
    packed = {name for name in found if name.endswith("weight_packed")}
    assert packed
    assert all(".mlp.experts." in name for name in packed)
    routed = {name for name in found if ".mlp.experts." in name}
    assert not any(name.endswith(".weight") for name in routed)
    ignored = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"][
        "ignore"
    ]
    assert "model.layers.0.self_attn.o_proj" in ignored
    assert not any(".mlp.experts." in name for name in ignored)


def test_experts_that_a_form_holds_only_in_part_are_refused_with_the_group_that_fits(
    tmp_path: Path,
) -> None:
    """down_proj has 32 columns, gate_proj and up_proj have 64. vLLM refuses such experts, and transformers loads others."""
    write_model(
        tmp_path / "hf", "deepseek_v3", hidden_size=64, moe_intermediate_size=32,
        q_lora_rank=64, kv_lora_rank=64, intermediate_size=64,
    )  # fmt: skip
    given: dict[str, Any] = {"saver": "hf", "quantize": "w4a16"}
    for further in ({}, {"modules": "experts"}):
        with pytest.raises(NotExpressible) as refused:
            megaconv.convert(
                tmp_path / "hf", tmp_path / "64", options={"group_size": "64", **further}, **given
            )
        message = str(refused.value)
        assert "can't hold model.layers.*.mlp.experts.*.down_proj [64, 32], " in message
        assert "all experts of a layer in one form" in message
        assert message.endswith("with a multiple of 64 columns; choose --option group_size=32")
    assert not (tmp_path / "64").exists()
    megaconv.convert(tmp_path / "hf", tmp_path / "32", options={"group_size": "32"}, **given)
    found = load_file(tmp_path / "32/model.safetensors")
    assert found["model.layers.1.mlp.experts.0.down_proj.weight_packed"].shape == (64, 4)


def test_the_published_nemotron_3_nano_is_told_its_group(tmp_path: Path) -> None:
    """Its experts have 1,856 columns: 29 groups of 64."""
    published = json.loads((FIXTURES / "published_models.json").read_text())
    name = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    (raw,) = (each["config"] for each in published if each["model"] == name)
    write_sparse(raw, tmp_path / "hf")
    words = r"down_proj \[2688, 1856\], .* choose --option group_size=64"
    with pytest.raises(NotExpressible, match=words):
        megaconv.convert(
            tmp_path / "hf", tmp_path / "out", saver="hf", quantize="w4a16", dry_run=True
        )


def test_a_notice_names_the_weights_that_stay_as_they_are_and_the_group_that_fits(
    tmp_path: Path,
) -> None:
    write_llama(tmp_path / "hf", hidden=128, ffn=96, layers=2)
    given: dict[str, Any] = {"saver": "hf", "quantize": "w8a16"}
    report = megaconv.convert(tmp_path / "hf", tmp_path / "128", **given)
    assert report.plan.notices[-1] == (
        "these weights are not rounded: model.layers.*.mlp.down_proj [128, 96]; "
        "w8a16 needs a matrix [out, in], with a multiple of 128 columns; --option group_size=32 fits all of them"
    )
    report = megaconv.convert(
        tmp_path / "hf", tmp_path / "32", options={"group_size": "32"}, **given
    )
    assert not any("not rounded" in each for each in report.plan.notices)


def test_a_fused_matrix_has_one_shape(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "glm4", hidden_size=64)
    megaconv.convert(
        tmp_path / "hf", tmp_path / "out", saver="hf", quantize="w4a16", verify=True,
        options={"group_size": "64"},
    )  # fmt: skip
    found = load_file(tmp_path / "out/model.safetensors")
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert found[f"{name}_shape"].tolist() == [found[f"{name}_packed"].shape[0], 64]


def is_ignored(module: str, ignored: list[str]) -> bool:
    """As compressed-tensors and vLLM decide it."""
    return any(
        re.match(name.removeprefix("re:"), module) if name.startswith("re:") else name == module
        for name in ignored
    )


@pytest.mark.parametrize(
    ("family", "sizes", "plain", "quantized"),
    [
        # transformers and vLLM have another name of the whole model than the files.
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M*-", "num_attention_heads": 4, "head_dim": 32},
            ["backbone.layers.0.mixer.in_proj", "model.layers.0.mixer.out_proj"],
            ["model.layers.1.mixer.q_proj", "backbone.layers.2.mixer.up_proj"],
        ),
        (
            "granite_moe",
            {"num_attention_heads": 4, "head_dim": 32, "num_local_experts": 4},
            ["model.layers.0.block_sparse_moe.experts.0.gate_proj"],
            ["model.layers.0.self_attn.q_proj"],
        ),
        # vLLM asks for the experts one by one.
        (
            "gpt_oss",
            {"num_attention_heads": 4, "head_dim": 32},
            ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts.0.gate_proj"],
            ["model.layers.0.self_attn.q_proj"],
        ),
    ],
)
def test_all_that_lies_in_a_module_without_quantized_weights_is_ignored(
    family: str, sizes: dict[str, Any], plain: list[str], quantized: list[str], tmp_path: Path
) -> None:
    write_model(
        tmp_path / "hf", family, hidden_size=128, intermediate_size=128, num_hidden_layers=3, **sizes
    )  # fmt: skip
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", quantize="w8a16", verify=True)
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert all(is_ignored(module, settings["ignore"]) for module in plain)
    assert not any(is_ignored(module, settings["ignore"]) for module in quantized)
    stored = load_file(tmp_path / "out/model.safetensors")
    packed = [name.removesuffix(".weight_packed") for name in stored if "_packed" in name]
    assert packed
    assert not any(is_ignored(module, settings["ignore"]) for module in packed)


def test_experts_that_transformers_reads_one_by_one_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "llama4", hidden_size=128, intermediate_size=128)
    with pytest.raises(NotExpressible, match="transformers reads the experts of llama4 in this"):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", quantize="w4a16")


def test_threads_and_memory_change_no_byte(tmp_path: Path) -> None:
    write_llama(tmp_path / "hf", hidden=256, ffn=384, layers=2)
    made = []
    for name, limits in (("one", {"workers": 1, "max_memory": 1 << 14}), ("four", {"workers": 4})):
        options: dict[str, Any] = {"saver": "hf", "quantize": "w4a16", **limits}
        megaconv.convert(tmp_path / "hf", tmp_path / name, **options)
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quantize": "w4a16", "options": {"group_size": "48"}}, "group_size=48: is not supported"),
        ({"quantize": "w4a16", "options": {"modules": "mlp"}}, "modules=mlp: is not known"),
        (
            {"quantize": "nvfp4", "options": {"modules": "experts"}},
            "modules: is for --quantize w4a",
        ),
        ({"options": {"group_size": "32"}}, "group_size: is for --quantize w4a16 and w8a16"),
        ({"quantize": "w8a16", "kv_cache": "fp8"}, "w8a16 has no place for scales of a cache"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_llama(tmp_path / "hf", hidden=128, ffn=256, layers=1)
    with pytest.raises(UsageError, match=words):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", **given)


def test_a_model_without_a_fitting_weight_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "hf", hidden=128, ffn=256, layers=1)
    with pytest.raises(NotExpressible, match="of a routed expert, with a multiple of 128 columns"):
        megaconv.convert(
            tmp_path / "hf", tmp_path / "out", saver="hf", quantize="w4a16",
            options={"modules": "experts"},
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("largest", [-8, -7, 7, 6, 5, 4, 3, 2, 1])
def test_groups_that_were_in_int4_before_keep_every_bit(largest: int, dtype: str) -> None:
    """Scales are all mantissas of the dtype that INT4 weights have, at several exponents, also below the normal ones."""
    generator = torch.Generator().manual_seed(largest + 8)
    rows, size, kind = 4096, 32, getattr(torch, dtype)
    mantissas = 1 + torch.arange(rows) % 128 / 128
    exponents = torch.randint(-20, 8, (rows,), generator=generator)
    if dtype == "bfloat16":
        exponents[::5] = torch.randint(-133, 120, (len(exponents[::5]),), generator=generator)
    scales = torch.ldexp(mantissas, exponents).to(kind).reshape(rows, 1)
    least, most = (-abs(largest), min(abs(largest), 7))
    codes = torch.randint(least, most + 1, (rows, size), generator=generator)
    codes[:, 3] = largest
    weight = (codes.to(kind) * scales).to(kind)
    assert weight.isfinite().all()
    words, found = quantized(weight, 4, size)
    numbers = torch.stack([as_torch(words) >> place & 15 for place in range(0, 32, 4)], dim=2) - 8
    assert torch.equal(numbers.reshape(rows, size).to(kind) * as_torch(found), weight)
    assert words.errors.largest == 0


def test_a_model_in_int4_comes_back_from_megatron_with_the_same_weights(tmp_path: Path) -> None:
    write_llama(tmp_path / "hf", hidden=128, ffn=256, layers=2)
    first = megaconv.convert(tmp_path / "hf", tmp_path / "int4", saver="hf", quantize="w4a16")
    megaconv.convert(tmp_path / "int4", tmp_path / "core", saver="core", tp=2, pp=2)
    again = megaconv.convert(
        tmp_path / "core", tmp_path / "again", saver="hf", quantize="w4a16", verify=True
    )
    assert first.fingerprint is not None
    assert again.fingerprint is not None
    assert again.fingerprint.weights == first.fingerprint.weights
    assert again.rounding is not None
    assert again.rounding.largest == 0
    smaller = megaconv.convert(
        tmp_path / "core", tmp_path / "32", saver="hf", quantize="w4a16",
        options={"group_size": "32"},
    )  # fmt: skip
    assert smaller.fingerprint is not None
    assert smaller.fingerprint.weights == first.fingerprint.weights


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 99,
}
EXPERTS = {
    "moe_intermediate_size": 96,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
HYBRID = {
    "layers_block_type": ["mamba", "attention", "mlp"],
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "head_dim": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
}
STACKED = {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", SIZES, {}),
        ("llama", SIZES | {"tie_word_embeddings": True}, {"group_size": "64"}),
        ("deepseek_v3", SIZES | EXPERTS, {"group_size": "32", "modules": "experts"}),
        ("nemotron_h", SIZES | HYBRID, {}),
        ("granitemoe", SIZES | STACKED, {}),
    ],
)
@pytest.mark.parametrize("dequantize", [True, False])
def test_transformers_loads_the_weights_that_we_read(
    family: str,
    sizes: dict[str, Any],
    options: dict[str, str],
    dequantize: bool,
    tmp_path: Path,
) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers needs compressed-tensors")
    from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "plain")
    given: dict[str, Any] = {"options": options}
    megaconv.convert(tmp_path / "plain", tmp_path / "int4", saver="hf", quantize="w4a16", **given)
    megaconv.convert(tmp_path / "int4", tmp_path / "read", saver="hf")
    loading = {"quantization_config": CompressedTensorsConfig(dequantize=dequantize)}
    tokens = torch.arange(9)[None]
    quantized_model, read_model = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16, **how)
        for name, how in (("int4", loading), ("read", {}))
    )
    # Without `dequantize` the first forward pass unpacks the weights.
    assert torch.equal(
        quantized_model(input_ids=tokens).logits, read_model(input_ids=tokens).logits
    )
    found, expected = quantized_model.state_dict(), read_model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
