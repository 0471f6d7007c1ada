"""`--quantize mxfp4`: torchao's bytes, weights that were MXFP4 before stay the same, and transformers loads the output."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from formats.tensor import Box
from megaconv import registry
from megaconv.engine.preparation import prepare
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible, UsageError
from megaconv.input import find_input
from megaconv.options import ConvertOptions, SaveOptions
from megaconv.values.code_tensors import Rounding
from megaconv.values.four_bits import Mxfp4Tensor
from megaconv.values.mxfp4 import Blocks, Mxfp4Codes, Mxfp4Exponents
from tests.conftest import FIXTURES
from tests.families.test_families import write_model
from tests.families.test_published_models import write_sparse
from tests.models import write_llama
from tests.values.test_quantized import as_torch, assert_same, in_rectangles

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 50,
}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def quantized(weight: torch.Tensor) -> tuple[Mxfp4Codes, Mxfp4Exponents]:
    blocks = Blocks(as_lazy(weight), "x")
    return Mxfp4Codes(blocks, Rounding()), Mxfp4Exponents(blocks)


def read_back(weight: torch.Tensor) -> torch.Tensor:
    """The values that a reader gets of a quantized weight."""
    codes, exponents = quantized(weight)
    rows, cols = weight.shape
    packed = as_lazy(as_torch(codes).reshape(rows, cols // 2))
    scales = as_lazy(as_torch(exponents))
    return as_torch(Mxfp4Tensor(packed, scales, (rows, cols), "bfloat16"))


def test_every_byte_is_the_one_that_torchao_makes_of_the_same_weight() -> None:
    """The fixture was made by `to_mx` of torchao 0.18 with its rule FLOOR, which is the specification's."""
    stored = load_file(FIXTURES / "torchao-mxfp4/golden.safetensors")
    codes, exponents = quantized(stored["source"])
    assert_same(as_torch(codes).reshape(6, 48), stored["codes"])
    assert_same(in_rectangles(codes, 5, 7).reshape(6, 48), stored["codes"])
    assert_same(as_torch(exponents), stored["exponents"])
    assert_same(in_rectangles(exponents, 4, 2), stored["exponents"])


@pytest.mark.parametrize("largest", range(8))
def test_weights_that_were_in_mxfp4_before_keep_every_bit_at_every_exponent(largest: int) -> None:
    """largest: the largest code of a block; 0 is a block of zeros, with and without a sign."""
    finite = 256 - 5 if largest > 5 else 252
    scales = torch.arange(finite, dtype=torch.uint8).reshape(-1, 1)
    generator = torch.Generator().manual_seed(largest)
    codes = torch.randint(0, largest + 1, (finite, 32), generator=generator, dtype=torch.uint8)
    codes[:, 7] = largest
    codes |= torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.uint8) << 3
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    given = Mxfp4Tensor(as_lazy(packed), as_lazy(scales), (finite, 32), "bfloat16")
    weight = as_torch(given)
    assert weight.isfinite().all()
    assert_same(read_back(weight), weight)


def test_values_between_two_codes_become_the_nearer_one_and_ties_the_even_one() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    ties = (values[1:] + values[:-1]) / 2
    evens = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    numbers = torch.cat(
        [ties, -ties, ties * 0.99, ties * 1.01, torch.tensor([7.9, -7.9, 6.0, 0.1])]
    )
    expected = torch.cat(
        [evens, -evens, values[:-1], values[1:], torch.tensor([6.0, -6.0, 6.0, 0.0])]
    )
    found = read_back(numbers.reshape(1, 32)).float()
    assert torch.equal(found, expected.reshape(1, 32))


@pytest.mark.parametrize("box", [Box(0, 6, 0, 16), Box(1, 5, 3, 16), Box(2, 3, 9, 10)])
def test_fingerprinted_values_equal_those_that_a_reader_gets_in_any_rectangle(box: Box) -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    codes, _ = quantized(weight)
    stored = np.empty((box.rows, box.cols), np.uint8)
    read = codes.read_both(box, stored)
    expected = read_back(weight).view(torch.uint8).numpy().reshape(6, 64)
    wanted = expected[box.row0 : box.row1, 4 * box.col0 : 4 * box.col1]
    np.testing.assert_array_equal(read, wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_by_name(value: float) -> None:
    codes, _ = quantized(torch.tensor([[value] + [0.0] * 31]))
    with pytest.raises(NotExpressible, match="x: holds values that are not finite, which MXFP4"):
        as_torch(codes)


def write_shipped(path: Path) -> Path:
    """A small GPT-OSS with experts in MXFP4, as OpenAI publishes it: any codes, exponents around those of weights."""
    write_model(path, "gpt_oss", **SIZES)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith(EXPERTS):
            stored[name] = tensor
            continue
        experts, cols, rows = tensor.shape
        grid = (experts, rows, cols // 32)
        blocks = torch.randint(0, 256, (*grid, 16), generator=generator, dtype=torch.uint8)
        blocks[0, 0] &= 0x99  # the smallest code and zeros alone
        blocks[1, 1] = 0
        scales = torch.randint(110, 122, grid, generator=generator, dtype=torch.uint8)
        stored |= {name + "_blocks": blocks, name + "_scales": scales}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "ep": 4, "moe_grouped_gemm": True},
        {"pp": 2, "ep": 2, "ckpt_format": "torch_dist", "dist_files": 2},
    ],
)
def test_a_gpt_oss_comes_back_from_megatron_with_the_same_weights(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    shipped = write_shipped(tmp_path / "shipped")
    megaconv.convert(shipped, tmp_path / "core", saver="core", **layout)
    report = megaconv.convert(
        tmp_path / "core", tmp_path / "out", saver="hf", quantize="mxfp4", verify=True
    )
    assert report.rounding is not None
    assert report.rounding.largest == 0
    assert report.fingerprint is not None
    assert report.fingerprint.weights == megaconv.fingerprint(shipped).weights
    assert megaconv.fingerprint(tmp_path / "out").weights == report.fingerprint.weights
    assert megaconv.verify(tmp_path / "out").same
    assert megaconv.inspect(tmp_path / "out").header.source == "hf, safetensors, mxfp4"
    given, found = (load_file(path / "model.safetensors") for path in (shipped, tmp_path / "out"))
    assert {name: (each.shape, each.dtype) for name, each in given.items()} == {
        name: (each.shape, each.dtype) for name, each in found.items()
    }
    described = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "mxfp4"
    assert "lm_head" in described["modules_to_not_convert"]
    assert not (tmp_path / "out/hf_quant_config.json").exists()


@pytest.mark.oracle
def test_transformers_loads_a_gpt_oss_in_mxfp4_and_computes_as_with_the_weights_that_we_read(
    tmp_path: Path,
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **SIZES)).bfloat16()
    plain.save_pretrained(tmp_path / "plain")
    megaconv.convert(tmp_path / "plain", tmp_path / "fp4", saver="hf", quantize="mxfp4")
    megaconv.convert(tmp_path / "fp4", tmp_path / "read", saver="hf")
    stored, read = (load_file(tmp_path / each / "model.safetensors") for each in ("fp4", "read"))
    experts = [name for name in read if name.endswith(EXPERTS)]
    assert len(experts) == 4
    for name in experts:
        blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        assert torch.equal(read[name], expected), name
    tokens = torch.arange(9)[None]
    on_cpu = {"quantization_config": Mxfp4Config(dequantize=True)}
    from_fp4, from_read = (
        AutoModelForCausalLM.from_pretrained(tmp_path / each, dtype=torch.bfloat16, **given)(
            input_ids=tokens
        ).logits
        for each, given in (("fp4", on_cpu), ("read", {}))
    )
    assert torch.equal(from_fp4, from_read)
    assert not torch.equal(from_fp4, plain(input_ids=tokens).logits)


def test_threads_and_memory_change_no_byte(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "gpt_oss", **SIZES)
    made = []
    for name, limits in (("one", {"workers": 1, "max_memory": 1 << 15}), ("four", {"workers": 4})):
        options: dict[str, Any] = {"saver": "hf", "quantize": "mxfp4", **limits}
        megaconv.convert(tmp_path / "hf", tmp_path / name, **options)
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[0] == made[1]


def test_the_published_model_has_its_files_tensors_and_bytes(tmp_path: Path) -> None:
    """openai/gpt-oss-20b: 459 tensors, and metadata.total_size in the index of its files."""
    published = json.loads((FIXTURES / "published_models.json").read_text())
    (raw,) = (each["config"] for each in published if each["model"] == "openai/gpt-oss-20b")
    write_sparse(raw, tmp_path / "hf")
    save = SaveOptions(quantize="mxfp4", max_shard_bytes=1 << 40)
    _, report = prepare(
        find_input(tmp_path / "hf"),
        tmp_path / "out",
        registry.saver("hf"),
        ConvertOptions(save=save),
    )
    records = report.plan.files["model.safetensors"].records
    assert len(records) == 459
    assert sum(record.nbytes for record in records.values()) == 13_761_264_768


def test_a_notice_says_that_stacked_experts_stay_as_they_are(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "gpt_oss", **SIZES)
    report = megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", quantize="nvfp4")
    assert any("weights of experts are not rounded" in each for each in report.plan.notices)
    report = megaconv.convert(tmp_path / "hf", tmp_path / "fp4", saver="hf", quantize="mxfp4")
    assert not any("are not rounded" in each for each in report.plan.notices)


def test_other_families_and_odd_sizes_are_refused_with_a_remedy(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")
    options: dict[str, Any] = {"saver": "hf", "quantize": "mxfp4"}
    with pytest.raises(NotExpressible, match=r"for gpt_oss alone, and this model is llama; choose"):
        megaconv.convert(tmp_path / "llama", tmp_path / "out", **options)
    write_model(tmp_path / "odd", "gpt_oss", **SIZES | {"intermediate_size": 40})
    with pytest.raises(NotExpressible, match=r"down_proj has 40 columns, .* a multiple of 32"):
        megaconv.convert(tmp_path / "odd", tmp_path / "out", **options)
    with pytest.raises(UsageError, match="--option group_size: is for --quantize w4a16 and w8a16"):
        megaconv.convert(
            tmp_path / "odd", tmp_path / "out", options={"group_size": "32"}, **options
        )
    assert not (tmp_path / "out").exists()
