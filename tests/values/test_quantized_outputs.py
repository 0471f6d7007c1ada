"""`--quantize fp8-block`: what torch and transformers make of what is written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import megaconv
from megaconv.errors import UsageError
from megaconv.values.fp8_blocks import e4m3
from tests.families.test_families import write_model
from tests.models import write_llama

ROUNDED = tuple(f"{kind}_proj.weight" for kind in ("q", "k", "v", "o", "gate", "up", "down"))


def test_every_float32_becomes_the_fp8_that_torch_makes_of_it() -> None:
    near = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    near = near[near.isfinite()]
    ties = (near.sort().values[1:] + near.sort().values[:-1]) / 2
    numbers = torch.cat(
        [near, ties, ties.nextafter(torch.tensor(9.0)), ties.nextafter(torch.tensor(-9.0))]
    )
    expected = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(e4m3(numbers.numpy()), expected)


def test_an_output_in_fp8_holds_blocks_as_torch_computes_them(tmp_path: Path) -> None:
    write_llama(tmp_path / "hf", hidden=160, ffn=264, layers=2)
    report = megaconv.convert(
        tmp_path / "hf", tmp_path / "fp8", saver="hf", quantize="fp8-block", verify=True
    )
    given, found = (
        load_file(tmp_path / "hf/model.safetensors"),
        load_file(tmp_path / "fp8/model.safetensors"),
    )
    errors = []
    for name, weight in given.items():
        if not name.endswith(ROUNDED):
            assert torch.equal(found[name], weight), name
            continue
        scales = found[name + "_scale_inv"]
        rows, cols = weight.shape
        for row in range(0, rows, 128):
            for col in range(0, cols, 128):
                block = weight[row : row + 128, col : col + 128].float()
                scale = block.abs().max() / 448
                assert scales[row // 128, col // 128] == scale
                stored = found[name][row : row + 128, col : col + 128]
                assert torch.equal(
                    stored.view(torch.uint8),
                    (block / scale).to(torch.float8_e4m3fn).view(torch.uint8),
                )
                errors.append((stored.float() * scale - block).flatten())
    off = torch.cat(errors).double()
    assert report.rounding is not None
    assert report.rounding.largest == off.abs().max().item()
    assert report.rounding.rms == pytest.approx(off.square().mean().sqrt().item())
    assert report.rounding.count == len(off)
    config = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [128, 128]
    assert "lm_head" in config["modules_to_not_convert"]
    assert json.loads((tmp_path / "fp8/megaconv.json").read_text())["quantized"] == "fp8-block"


def test_an_output_in_fp8_is_read_as_its_record_says(tmp_path: Path) -> None:
    write_llama(tmp_path / "hf", hidden=160, ffn=264, layers=2)
    report = megaconv.convert(tmp_path / "hf", tmp_path / "fp8", saver="hf", quantize="fp8-block")
    assert report.fingerprint is not None
    assert megaconv.fingerprint(tmp_path / "fp8").weights == report.fingerprint.weights
    assert megaconv.verify(tmp_path / "fp8").same
    plain = megaconv.convert(tmp_path / "fp8", tmp_path / "plain", saver="hf")
    assert plain.fingerprint is not None
    assert plain.fingerprint.weights == report.fingerprint.weights


@pytest.mark.oracle
def test_transformers_dequantizes_an_output_in_fp8_to_what_we_read(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    # Sizes are multiples of a block, because narrower blocks are not supported.
    write_llama(tmp_path / "hf", hidden=128, ffn=256, layers=2)
    megaconv.convert(tmp_path / "hf", tmp_path / "fp8", saver="hf", quantize="fp8-block")
    megaconv.convert(tmp_path / "fp8", tmp_path / "plain", saver="hf")
    stored, read = (
        load_file(tmp_path / "fp8/model.safetensors"),
        load_file(tmp_path / "plain/model.safetensors"),
    )
    for name in (name for name in read if name.endswith(ROUNDED)):
        scales = stored[name + "_scale_inv"]
        expected = Fp8Dequantize(None)._dequantize_one(
            stored[name], scales, output_dtype=torch.bfloat16
        )
        assert torch.equal(read[name], expected), name


def test_a_fused_tensor_is_quantized_where_its_pieces_fill_whole_blocks(tmp_path: Path) -> None:
    for ffn, is_quantized in ((128, True), (96, False)):
        given, made = (
            write_model(tmp_path / f"{ffn}", "glm4", intermediate_size=ffn),
            tmp_path / f"{ffn}-fp8",
        )
        megaconv.convert(given, made, saver="hf", quantize="fp8-block", verify=True)
        name = "model.layers.0.mlp.gate_up_proj"
        kept = json.loads((made / "config.json").read_text())["quantization_config"][
            "modules_to_not_convert"
        ]
        assert (f"{name}.weight_scale_inv" in load_file(made / "model.safetensors")) == is_quantized
        assert (name in kept) != is_quantized


@pytest.mark.parametrize(
    ("quantize", "named"),
    [
        ("fp8-block", "fp8 (blocks of 128 x 128)"),
        ("fp8-per-channel", "modelopt (FP8_PER_CHANNEL_PER_TOKEN)"),
        ("nvfp4", "modelopt (W4A16_NVFP4)"),
    ],
)
def test_the_description_of_a_quantized_output_names_its_method(
    quantize: str, named: str, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "hf", hidden=128, ffn=256, layers=1)
    megaconv.convert(source, tmp_path / "out", saver="hf", quantize=quantize)
    assert megaconv.inspect(tmp_path / "out").header.source == f"hf, safetensors, {named}"


def test_an_unknown_quantization_names_the_known_one(tmp_path: Path) -> None:
    write_llama(tmp_path / "hf", hidden=160, ffn=264, layers=2)
    with pytest.raises(UsageError, match="fp8-block"):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", quantize="int4")
    with pytest.raises(UsageError, match="--quantize"):
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="core", quantize="fp8-block")


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "sizes", "plain", "quantized"),
    [
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M*-"},
            ["model.layers.0.mixer.in_proj", "model.layers.0.mixer.out_proj"],
            ["model.layers.1.mixer.q_proj", "model.layers.2.mixer.up_proj"],
        ),
        (
            "granite_moe",
            {},
            ["model.layers.0.block_sparse_moe.experts"],
            ["model.layers.0.self_attn.q_proj"],
        ),
    ],
)
def test_transformers_converts_no_module_without_quantized_weights(
    family: str, sizes: dict[str, Any], plain: list[str], quantized: list[str], tmp_path: Path
) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    write_model(tmp_path / "hf", family, **sizes)
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", quantize="fp8-block")
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    kept = settings["modules_to_not_convert"]
    assert not any(should_convert_module(module, kept) for module in plain)
    assert all(should_convert_module(module, kept) for module in quantized)
