"""`--quantize nvfp4`: ModelOpt's own bytes, scales that what is joined shares, and that what is written is read."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import megaconv
from formats.tensor import Box
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible
from megaconv.values.code_tensors import Rounding
from megaconv.values.nvfp4 import Fp4Scales, Fp4Values, Groups, shared_scale
from megaconv.values.shared_scale import OneScale
from tests.families.test_families import write_model
from tests.models import write_llama
from tests.values.test_nvfp4 import MODULES, STORED
from tests.values.test_quantized import as_torch, assert_same, in_rectangles


@pytest.mark.parametrize("module", MODULES)
def test_every_byte_is_the_one_that_modelopt_makes_of_the_same_weight(module: str) -> None:
    source = as_lazy(STORED[f"{module}.source"])
    groups = Groups(source, shared_scale([(module, source)]))
    values, scales = Fp4Values(groups, Rounding()), Fp4Scales(groups)
    assert_same(as_torch(values), STORED[f"{module}.weight"])
    assert_same(
        as_torch(scales).view(torch.uint8), STORED[f"{module}.weight_scale"].view(torch.uint8)
    )
    assert_same(as_torch(OneScale(groups.shared)), STORED[f"{module}.weight_scale_2"])
    assert_same(in_rectangles(values, 5, 7), STORED[f"{module}.weight"])
    assert_same(
        in_rectangles(scales, 3, 2).view(torch.uint8),
        STORED[f"{module}.weight_scale"].view(torch.uint8),
    )


@pytest.mark.parametrize("box", [Box(0, 3, 0, 32), Box(1, 2, 5, 30), Box(2, 3, 9, 10)])
def test_fingerprinted_values_equal_those_that_a_reader_gets_in_any_rectangle(box: Box) -> None:
    source = as_lazy(torch.randn(3, 64, generator=torch.Generator().manual_seed(5)).bfloat16())
    values = Fp4Values(Groups(source, shared_scale([("x", source)])), Rounding())
    rows, all_rows = np.empty((box.rows, box.cols), np.uint8), np.empty((3, 32), np.uint8)
    whole = values.read_both(Box(0, 3, 0, 32), all_rows)
    wanted = whole[box.row0 : box.row1, box.col0 * 4 : box.col1 * 4]
    np.testing.assert_array_equal(values.read_both(box, rows), wanted)


def test_zeros_and_values_that_are_tiny_beside_the_largest_stay_finite() -> None:
    weights = torch.zeros(3, 32)
    weights[0, 0], weights[0, 16], weights[1, 3] = 1e4, 1e-6, -1e-30
    for numbers in (weights, torch.zeros(2, 16)):
        source = as_lazy(numbers)
        values = Fp4Values(Groups(source, shared_scale([("x", source)])), Rounding())
        assert as_torch(values).shape == (len(numbers), numbers.shape[1] // 2)
        assert np.isfinite(values.errors.largest)
        assert values.errors.largest <= 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_by_name(value: float) -> None:
    source = as_lazy(torch.tensor([[value] + [0.0] * 15]))
    with pytest.raises(
        NotExpressible, match=r"layers\.0\.mlp\.up: holds values that are not finite"
    ):
        as_torch(Fp4Values(Groups(source, shared_scale([("layers.0.mlp.up", source)])), Rounding()))


def test_a_model_in_nvfp4_shares_scales_among_what_engines_join_and_is_read_as_its_record_says(
    tmp_path: Path,
) -> None:
    write_llama(tmp_path / "hf", hidden=64, ffn=96, layers=2)
    report = megaconv.convert(
        tmp_path / "hf", tmp_path / "fp4", saver="hf", quantize="nvfp4", verify=True
    )
    given, found = (
        load_file(tmp_path / "hf/model.safetensors"),
        load_file(tmp_path / "fp4/model.safetensors"),
    )
    layer = "model.layers.1."
    for module, parts in (
        ("self_attn", "qkv"),
        ("self_attn", "o"),
        ("mlp", ("gate", "up")),
        ("mlp", ("down",)),
    ):
        names = [f"{layer}{module}.{part}_proj.weight" for part in parts]
        largest = max(given[name].float().abs().max() for name in names)
        for name in names:
            assert found[f"{name}_scale_2"] == (largest / (6 * 448)).float(), name
            assert found[name].dtype == torch.uint8
            assert found[name].shape == (given[name].shape[0], given[name].shape[1] // 2)
            assert found[f"{name}_scale"].dtype == torch.float8_e4m3fn
    assert torch.equal(found["lm_head.weight"], given["lm_head.weight"])
    assert not [name for name in found if name.endswith("input_scale")]
    config = json.loads((tmp_path / "fp4/config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"], config["ignore"][0]) == (
        "modelopt",
        "W4A16_NVFP4",
        "lm_head",
    )
    beside = json.loads((tmp_path / "fp4/hf_quant_config.json").read_text())["quantization"]
    assert (beside["quant_algo"], beside["group_size"]) == ("W4A16_NVFP4", 16)
    assert report.rounding is not None
    assert report.rounding.largest > 0
    assert report.fingerprint is not None
    assert megaconv.fingerprint(tmp_path / "fp4").weights == report.fingerprint.weights
    plain = megaconv.convert(tmp_path / "fp4", tmp_path / "plain", saver="hf")
    assert plain.fingerprint is not None
    assert plain.fingerprint.weights == report.fingerprint.weights


def test_tensors_that_are_fused_have_one_scale_and_experts_of_a_layer_too(tmp_path: Path) -> None:
    for family, names in (
        ("glm4", ("model.layers.0.mlp.gate_up_proj.weight",)),
        ("deepseek_v3", ("model.layers.0.self_attn.kv_b_proj.weight",)),
    ):
        made = tmp_path / f"{family}-fp4"
        sizes = {"hidden_size": 64} | (
            {"q_lora_rank": 32, "kv_lora_rank": 16, "moe_intermediate_size": 16}
            if family == "deepseek_v3"
            else {}
        )
        megaconv.convert(
            write_model(tmp_path / family, family, **sizes),
            made,
            saver="hf",
            quantize="nvfp4",
            verify=True,
        )
        found = load_file(made / "model.safetensors")
        for name in names:
            assert found[name].dtype == torch.uint8
            assert found[f"{name}_scale_2"].shape == ()
        experts = {
            found[name].item()
            for name in found
            if ".1.mlp.experts." in name
            and name.endswith(("gate_proj.weight_scale_2", "up_proj.weight_scale_2"))
        }
        assert len(experts) <= 1
        assert bool(experts) == (family == "deepseek_v3")


def test_a_matrix_whose_rows_are_no_whole_groups_stays_as_it_is_and_is_listed(
    tmp_path: Path,
) -> None:
    write_llama(tmp_path / "hf", hidden=64, ffn=88, layers=1)
    megaconv.convert(tmp_path / "hf", tmp_path / "fp4", saver="hf", quantize="nvfp4", verify=True)
    config = json.loads((tmp_path / "fp4/config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", "model.embed_tokens", "model.layers.0.mlp.down_proj"]
