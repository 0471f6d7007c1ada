"""Quantized weights: every value that transformers' own dequantization gives for the same bytes, in any rectangle."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import megaconv
from formats.tensor import ITEMSIZE, Box, LazyTensor, read_tensor
from megaconv.engine.conversion import fingerprint
from megaconv.engine.stream import ArrayTensor, as_lazy
from megaconv.errors import TensorMismatch, UnsupportedInput
from megaconv.values.quantized import dequantize
from tests.families.test_families import write_model
from tests.models import write_llama
from tests.runs import assert_refused, run

DTYPES = ("bfloat16", "float16", "float32")


def fp8_config(rows: int, cols: int) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": [rows, cols]}}


def as_torch(tensor: LazyTensor) -> torch.Tensor:
    values: Any = torch.from_numpy(read_tensor(tensor).reshape(-1)).view(
        getattr(torch, tensor.dtype)
    )
    return values.reshape(tuple(tensor.shape))  # type: ignore[no-any-return]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Every bit, but of NaNs, which there are many of."""
    assert found.dtype == expected.dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(found[numbers].view(bits), expected[numbers].view(bits))


def in_rectangles(tensor: LazyTensor, height: int, width: int) -> torch.Tensor:
    """Read piece by piece, into a buffer that is wider than the piece."""
    rows, cols = np.prod(tensor.shape[:-1]), tensor.shape[-1]
    itemsize = ITEMSIZE[tensor.dtype]
    whole = np.zeros((rows, cols * itemsize), np.uint8)
    for row in range(0, rows, height):
        for col in range(0, cols, width):
            box = Box(row, min(row + height, rows), col, min(col + width, cols))
            tensor.read_into(
                box, whole[box.row0 : box.row1, box.col0 * itemsize : box.col1 * itemsize]
            )
    values: Any = torch.from_numpy(whole.reshape(-1)).view(getattr(torch, tensor.dtype))
    return values.reshape(tuple(tensor.shape))  # type: ignore[no-any-return]


# FP8.


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bytes_of_fp8_are_what_transformers_makes_of_them(dtype: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(24, 32)
    scales = torch.tensor([[1.0, 0.37, 3e-5], [1e30, 7.5e-4, 1e-39]])[:, :2].contiguous()
    scales[1, 1] = 0.0301
    tensors = {
        "x.weight": as_lazy(values.view(torch.float8_e4m3fn)),
        "x.weight_scale_inv": as_lazy(scales),
    }
    (found,) = dequantize(tensors, fp8_config(12, 16), dtype, "here", overflow=True).values()
    weight = values.view(torch.float8_e4m3fn)
    expected = Fp8Dequantize(None)._dequantize_one(
        weight, scales, output_dtype=getattr(torch, dtype)
    )
    assert_same(as_torch(found), expected)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_blocks_that_do_not_fill_the_matrix_and_any_rectangles(data: st.DataObject) -> None:
    """The expected values follow DeepSeek's own kernel: element by element, from the block of each element."""
    rows, cols, high, wide = (data.draw(st.integers(1, size)) for size in (9, 9, 4, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randn(rows, cols, generator=generator).to(torch.float8_e4m3fn)
    blocks_down, blocks_across = -(-rows // high), -(-cols // wide)
    scales = torch.rand(blocks_down, blocks_across, generator=generator)
    tensors = {"x.weight": as_lazy(values), "x.weight_scale_inv": as_lazy(scales)}
    (found,) = dequantize(tensors, fp8_config(high, wide), None, "here").values()
    scale_of_each = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :cols]
    expected = (values.float() * scale_of_each).bfloat16()
    rows_at_once, cols_at_once = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    assert_same(in_rectangles(found, rows_at_once, cols_at_once), expected)


# MXFP4.


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bytes_and_scales_of_mxfp4_are_what_transformers_makes_of_them(
    dtype: str, tmp_path: Path
) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # In this range both formats can represent the value.
    low, high = (0, 255) if dtype != "float16" else (127 - 14, 127 + 10)
    scales = torch.randint(low, high, (4, 16, 3), generator=torch.Generator().manual_seed(1)).to(
        torch.uint8
    )
    blocks = torch.arange(256, dtype=torch.uint8).repeat(12).reshape(4, 16, 3, 16)
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "x.safetensors")
    from formats import safetensors

    stored = safetensors.read(tmp_path / "x.safetensors")
    (found,) = dequantize(
        stored, {"quantization_config": {"quant_method": "mxfp4"}}, dtype, "here"
    ).values()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, dtype)).transpose(
        1, 2
    )
    assert found.shape == (4, 16, 96)
    assert_same(as_torch(found), expected)
    assert_same(in_rectangles(found, 5, 7), expected)


# What can't be.


def array(shape: tuple[int, ...], dtype: str) -> ArrayTensor:
    return ArrayTensor(np.zeros(shape, {1: np.uint8, 4: np.float32}[ITEMSIZE[dtype]]), shape, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (
            (2, 2),
            "float32",
            r"x.weight is \[256, 300\] float8_e4m3fn with scales \[2, 2\] float32; expected .* \[2, 3\]",
        ),
        ((2, 3), "int8", "scales .* int8"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    shape: tuple[int, ...], dtype: str, message: str
) -> None:
    tensors = {
        "x.weight": array((256, 300), "float8_e4m3fn"),
        "x.weight_scale_inv": array(shape, dtype),
    }
    with pytest.raises(TensorMismatch, match=message):
        dequantize(tensors, fp8_config(128, 128), None, "here")


@pytest.mark.oracle
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_in_fp8_with_one_scale_is_what_transformers_makes_of_it(
    scale_dtype: torch.dtype,
) -> None:
    """Its rows may be in several tensors, which have one scale together."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    table = torch.arange(240).byte().reshape(20, 12).view(torch.float8_e4m3fn)
    scale = torch.tensor([0.37], dtype=scale_dtype)
    embedding = fp8.FP8Embedding(20, 12)
    embedding.weight.data, embedding.weight_scale.data = table, scale
    expected = embedding(torch.arange(20))
    dtype = str(scale_dtype).removeprefix("torch.")
    parts = {f"x.shard_{part}.weight": as_lazy(table[7 * part : 7 * part + 7]) for part in range(3)}
    found = dequantize({**parts, "x.weight_scale": as_lazy(scale)}, fp8_config(4, 4), dtype, "here")
    assert found.keys() == parts.keys()
    assert_same(torch.cat([in_rectangles(part, 3, 5) for part in found.values()]), expected)
    whole = {"x.weight": as_lazy(table), "x.weight_scale": as_lazy(scale)}
    (one,) = dequantize(whole, fp8_config(4, 4), dtype, "here").values()
    assert_same(as_torch(one), expected)


def test_an_embedding_in_fp8_with_several_scales_is_refused() -> None:
    tensors = {"x.shard_0.weight": array((8, 8), "float8_e4m3fn"), "x.weight_scale": array((2,), "float32")}  # fmt: skip
    with pytest.raises(TensorMismatch, match=r"x\.shard_0\.weight .* expected .* with one scale"):
        dequantize(tensors, fp8_config(4, 4), None, "here")


def test_fp8_and_mxfp4_without_scales_are_refused() -> None:
    with pytest.raises(
        TensorMismatch, match=r"x\.weight is fp8, and there is no x\.weight_scale_inv"
    ):
        dequantize({"x.weight": array((8, 8), "float8_e4m3fn")}, fp8_config(4, 4), None, "here")
    v4 = {
        "x.weight": array((8, 8), "float8_e4m3fn"),
        "x.scale": array((2, 2), "float8_e8m0fnu"),
    }
    for dtype, kind in (("float8_e4m3fn", "fp8"), ("int8", "fp4")):
        with pytest.raises(TensorMismatch, match=rf"y\.weight is {kind}, and there is no y\.scale"):
            dequantize(v4 | {"y.weight": array((8, 8), dtype)}, fp8_config(4, 4), None, "here")
    orphan = {"x.weight_scale_inv": array((2, 2), "float32")}
    with pytest.raises(TensorMismatch, match=r"there is no x\.weight$"):
        dequantize(orphan, fp8_config(4, 4), None, "here")
    both = {name: array((2, 2, 16), "uint8") for name in ("x", "x_blocks")}
    with pytest.raises(TensorMismatch, match="holds x and x_blocks, two forms of one weight"):
        dequantize(both, {"quantization_config": {"quant_method": "mxfp4"}}, None, "here")
    with pytest.raises(TensorMismatch, match="there is no x_scales to x_blocks"):
        dequantize(
            {"x_blocks": array((2, 2, 16), "uint8")},
            {"quantization_config": {"quant_method": "mxfp4"}},
            None,
            "h",
        )


def test_other_methods_are_refused() -> None:
    with pytest.raises(UnsupportedInput, match=r"quantized \(hqq\).*fp8 or mxfp4"):
        dequantize({}, {"quantization_config": {"quant_method": "hqq"}}, None, "here")


# Whole models.


def quantize(model: Path, block: int = 8) -> dict[str, torch.Tensor]:
    """Turn the linear layers of a model into fp8, in place; returns what they now mean, in float32."""
    stored, meant = {}, {}
    for name, tensor in load_file(model / "model.safetensors").items():
        stored[name], meant[name] = tensor, tensor.float()
        if "_proj" in name or ".experts." in name:
            rows, cols = tensor.shape
            scales = (
                torch.rand(
                    -(-rows // block),
                    -(-cols // block),
                    generator=torch.Generator().manual_seed(rows),
                )
                + 0.5
            )
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = scales
            spread = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :cols]
            meant[name] = stored[name].float() * spread
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | fp8_config(block, block)
    (model / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize(
    ("word", "dtype"), [(None, "bfloat16"), ("fp32", "float32"), ("fp16", "float16")]
)
def test_a_quantized_model_becomes_a_plain_one_in_the_dtype_asked_for(
    word: str | None, dtype: str, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "model", layers=2, hidden=20, heads=10, kv_heads=2)
    meant = quantize(model)
    megaconv.convert(model, tmp_path / "core", saver="core", tp=2, pp=2, dtype=word)
    megaconv.convert(tmp_path / "core", tmp_path / "hf", saver="hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        assert_same(found[name], tensor.to(getattr(torch, dtype)))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["torch_dtype"], config.get("quantization_config")) == (dtype, None)


@pytest.mark.parametrize("family", ["minimax_m2", "deepseek_v32"])
def test_a_model_in_fp8_as_it_is_shipped_becomes_a_plain_one(family: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", family)
    meant = quantize(model)
    megaconv.convert(model, tmp_path / "core", saver="core", tp=2, ep=2)
    megaconv.convert(tmp_path / "core", tmp_path / "hf", saver="hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        assert_same(found[name], tensor.bfloat16())


def test_quantized_weights_need_no_torch_and_little_memory_to_convert(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=1)
    quantize(model)
    before = "import sys; sys.modules['torch'] = None"
    from tests.runs import finish, start

    done = finish(
        start(
            "convert",
            "--load-dir",
            model,
            "--saver",
            "core",
            "--save-dir",
            tmp_path / "core",
            before=before,
        )
    )
    assert done.status == 0, done.err


def test_a_missing_scale_is_one_clear_error(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", layers=1)
    quantize(model)
    stored = load_file(model / "model.safetensors")
    del stored["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(stored, model / "model.safetensors")
    outcome = run(
        "convert", "--load-dir", model, "--saver", "core", "--save-dir", tmp_path / "core"
    )
    assert_refused(outcome, 3, "model.layers.0.mlp.up_proj.weight is fp8", "weight_scale_inv")
    assert not (tmp_path / "core").exists()


# GPT-OSS.


@pytest.mark.oracle
def test_a_gpt_oss_in_mxfp4_becomes_what_transformers_dequantizes_it_to(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 50,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt_oss", **sizes)
    ).bfloat16().save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    megaconv.convert(tmp_path / "plain", tmp_path / "again", saver="hf")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == plain.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in plain.items())

    stored, expected = {}, dict(plain)
    for name, tensor in plain.items():
        stored[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del stored[name]
            experts, cols, rows = tensor.shape
            blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 130, (experts, rows, cols // 32), dtype=torch.uint8)
            stored |= {name + "_blocks": blocks, name + "_scales": scales}
            expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (shipped / "config.json").write_text(json.dumps(config))
    save_file(stored, shipped / "model.safetensors", metadata={"format": "pt"})
    megaconv.convert(shipped, tmp_path / "out", saver="hf", verify=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model(input_ids=torch.arange(9)[None]).logits.isfinite().all()

    # For Megatron and back: by way of a few layouts and formats, the same as without it.
    layouts: list[dict[str, Any]] = [
        {"tp": 2, "ep": 4, "moe_grouped_gemm": True},
        {"pp": 2, "ep": 2, "ckpt_format": "torch_dist", "dist_files": 2},
        {"tp": 2, "ep": 2, "ckpt_format": "zarr", "transformer_impl": "local"},
    ]
    source, odd = shipped, 43 * 64 * 2  # blocks of 43 rows, so that pairs of rows are torn
    for number, layout in enumerate(layouts):
        megaconv.convert(
            source,
            tmp_path / f"core{number}",
            saver="core",
            workers=1,
            max_memory=4 * odd,
            **layout,
        )
        source = tmp_path / f"core{number}"
        assert fingerprint(source).weights == fingerprint(shipped).weights
    megaconv.convert(source, tmp_path / "back", saver="hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())
    refused = run(
        "convert", "--load-dir", shipped, "--saver", "legacy", "--save-dir", tmp_path / "legacy"
    )
    assert_refused(
        refused,
        2,
        "Megatron's legacy models can't represent this model: it has",
        "choose --saver core",
    )
    refused = run(
        "convert",
        "--load-dir",
        shipped,
        "--saver",
        "llama_mistral",
        "--save-dir",
        tmp_path / "meta",
    )
    assert_refused(refused, 2, "layers.window", "params.json can't represent")
