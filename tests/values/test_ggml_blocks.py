"""ggml's quantized types: the bytes that ggml writes, and the numbers that it reads.

tests/fixtures/ggml-blocks has both, from ggml's own functions (commit d99724f2, gcc -O2 for x86-64), without an importance
matrix.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

import megaconv
from formats import gguf_header
from formats.gguf import BLOCK_TYPES, READ_TYPES
from formats.tensor import LazyTensor
from megaconv.engine.stream import as_lazy
from megaconv.errors import NotExpressible, TensorMismatch, UsageError
from megaconv.gguf.types import MIXTURES
from megaconv.values.ggml_blocks import BlockTensor, BlockValues, WeightedBlockTensor, values_of
from megaconv.values.ggml_quantizers import QUANTIZERS
from megaconv.values.ggml_read_blocks import READ_VALUES
from megaconv.values.ggml_weighted import WEIGHTED
from tests.calibrations import write_statistics
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.values.test_quantized import as_torch, assert_same, in_rectangles

STORED = load_file(FIXTURES / "ggml-blocks/blocks.safetensors")
NUMBERS = STORED["numbers"]
IMPORTANT = load_file(FIXTURES / "ggml-blocks/weighted.safetensors")
READ_ONLY = load_file(FIXTURES / "ggml-blocks/read_only.safetensors")


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_have_the_bytes_that_ggml_writes(kind: str) -> None:
    size, _ = BLOCK_TYPES[kind]
    made = QUANTIZERS[kind](NUMBERS.reshape(-1, size))
    is_same = (made == STORED[kind]).all(axis=1)
    assert is_same.all(), np.flatnonzero(~is_same)


@pytest.mark.parametrize("kind", WEIGHTED)
def test_blocks_with_an_importance_matrix_have_the_bytes_that_ggml_writes(kind: str) -> None:
    """The fixture is of ggml's quantize_q4_K and the like (llama-cpp-python 0.3.36, gcc -O2 -ffp-contract=off)."""
    made = WEIGHTED[kind](NUMBERS, IMPORTANT["importance"])
    is_same = (made == IMPORTANT[kind]).all(axis=1)
    assert is_same.all(), np.flatnonzero(~is_same)


@pytest.mark.parametrize("kind", WEIGHTED)
def test_any_rectangle_of_weighted_blocks_has_the_same_bytes(kind: str) -> None:
    made = WeightedBlockTensor(
        as_lazy(torch.from_numpy(NUMBERS)), kind, IMPORTANT["importance"], "w"
    )
    whole = as_torch(made)
    assert torch.equal(whole.reshape(IMPORTANT[kind].shape), torch.from_numpy(IMPORTANT[kind]))
    assert_same(in_rectangles(made, 5, 100), whole)


def error_of_outputs(directory: Path, source: Path, inputs: dict[str, torch.Tensor]) -> float:
    """The squared error of the matrices of a GGUF file, weighted with the squared inputs."""
    megaconv.convert(directory / "model.gguf", directory / "back", saver="hf", config=source)
    given = load_tensors(source / "model.safetensors")
    found = load_tensors(directory / "back/model.safetensors")
    total = 0.0
    for name, squares in inputs.items():
        weight = name.replace("input_channel_square", "weight")
        off = found[weight].float() - given[weight].float()
        total += float((off.square() * squares).sum())
    return total


@pytest.mark.parametrize("wanted", ["q4_0", "q4_k_m", "q5_k_m", "q6_k"])
def test_a_calibration_makes_the_error_of_outputs_smaller(tmp_path: Path, wanted: str) -> None:
    source = write_llama(tmp_path / "hf", hidden=256, ffn=512, layers=2)
    generator = torch.Generator().manual_seed(3)
    squares = {
        name.replace("weight", "input_channel_square"): torch.rand(each.shape[1], generator=generator) ** 6
        for name, each in load_tensors(source / "model.safetensors").items()
        if name.endswith("_proj.weight")
    }  # fmt: skip
    statistics = write_statistics(tmp_path / "amax.safetensors", squares, source)
    options = {"gguf_type": wanted, "tokenizer": "none"}
    for name, calibration in (("plain", None), ("weighted", statistics)):
        megaconv.convert(
            source, tmp_path / name, saver="gguf", options=options, calibration=calibration, verify=True
        )  # fmt: skip
    plain, weighted = (
        error_of_outputs(tmp_path / name, source, squares) for name in ("plain", "weighted")
    )
    assert weighted < 0.95 * plain


def test_a_calibration_that_is_not_needed_or_not_of_the_weights_is_refused(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "hf", hidden=256, ffn=256, layers=1)
    other = write_llama(tmp_path / "other", hidden=256, ffn=256, layers=1, seed=1)
    squares = {
        name.replace("weight", "input_channel_square"): torch.ones(each.shape[1])
        for name, each in load_tensors(source / "model.safetensors").items()
        if name.endswith("_proj.weight")
    }
    statistics = write_statistics(tmp_path / "amax.safetensors", squares, other)
    for wanted, error, message in (
        ("q8_0", UsageError, "needs no statistics"),
        ("q4_k_m", TensorMismatch, "its statistics are of the weights"),
    ):
        options = {"gguf_type": wanted, "tokenizer": "none"}
        with pytest.raises(error, match=message):
            megaconv.convert(
                source, tmp_path / "out", saver="gguf", options=options, calibration=statistics
            )


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_values_are_those_that_ggml_reads(kind: str) -> None:
    np.testing.assert_array_equal(
        values_of(kind, STORED[kind]).reshape(NUMBERS.shape), STORED[f"{kind}_values"]
    )


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_any_rectangle_has_the_same_bytes_and_the_same_values(kind: str) -> None:
    tensor = as_lazy(torch.from_numpy(NUMBERS))
    made = BlockTensor(tensor, kind, "w")
    whole = as_torch(made)
    assert_same(in_rectangles(made, 5, 100), whole)
    values = BlockValues(as_lazy(whole), kind, NUMBERS.shape, "float32")
    assert_same(in_rectangles(values, 5, 77), torch.from_numpy(STORED[f"{kind}_values"]))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -1e38, 3e12, -3e8], ids=str)
@pytest.mark.filterwarnings("error")
def test_numbers_without_finite_blocks_are_refused_by_name(kind: str, value: float) -> None:
    """All of a block would be NaN, or infinite."""
    numbers = np.ones((3, 512), np.float32)
    numbers[1, 300] = value
    source = as_lazy(torch.from_numpy(numbers))
    made: list[LazyTensor] = [BlockTensor(source, kind, "w")]
    if kind in WEIGHTED:
        importance = np.ones(512, np.float32)
        made.append(WeightedBlockTensor(source, kind, importance, "w"))
    for tensor in made:
        with pytest.raises(NotExpressible, match=f"^w: holds values .* which {kind} can't express"):
            as_torch(tensor)


def test_types_that_are_read_alone_have_the_sizes_of_the_header() -> None:
    sizes = {each.name: (each.block, each.nbytes) for each in gguf_header.TYPES.values()}
    assert {name: sizes[name] for name in READ_TYPES} == READ_TYPES
    assert READ_TYPES.keys() - BLOCK_TYPES.keys() == READ_VALUES.keys()


@pytest.mark.parametrize("kind", READ_VALUES)
def test_types_that_are_read_alone_have_the_values_that_gguf_py_computes(kind: str) -> None:
    """The fixture has drawn bytes and what gguf-py 0.19 makes of them."""
    expected = torch.from_numpy(READ_ONLY[f"{kind}_values"]).reshape(4, 512)
    stored = torch.from_numpy(READ_ONLY[kind]).reshape(4, -1)
    values = BlockValues(as_lazy(stored), kind, (4, 512), "float32")
    assert_same(as_torch(values), expected)
    assert_same(in_rectangles(values, 3, 77), expected)


def with_type(file: Path, old: int, new: int) -> list[str]:
    """Turn tensors of one type of a GGUF file into another one, whose blocks have the same size. Returns their names."""
    content = bytearray(file.read_bytes())
    names = []
    for name, tensor in gguf_header.read(file).tensors.items():
        entry = len(name).to_bytes(8, "little") + name.encode()
        place = content.index(entry) + len(entry) + 4 + 8 * len(tensor.shape)
        if int.from_bytes(content[place : place + 4], "little") == old:
            content[place : place + 4] = new.to_bytes(4, "little")
            names.append(name)
    file.write_bytes(content)
    return names


def test_a_model_in_a_type_that_is_read_alone_becomes_a_plain_one(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "hf", hidden=256, ffn=512, layers=1)
    options = {"gguf_type": "q4_0", "tokenizer": "none"}
    megaconv.convert(source, tmp_path / "out", saver="gguf", options=options)
    (tmp_path / "out/megaconv.json").unlink()
    file = tmp_path / "out/model.gguf"
    iq4_nl = {each.name: number for number, each in gguf_header.TYPES.items()}["iq4_nl"]
    assert "blk.0.ffn_up.weight" in with_type(file, 2, iq4_nl)
    tensor = gguf_header.read(file).tensors["blk.0.ffn_up.weight"]
    assert tensor.dtype == "iq4_nl"
    megaconv.convert(file, tmp_path / "back", saver="hf", config=source)
    found = load_tensors(tmp_path / "back/model.safetensors")
    stored = np.frombuffer(file.read_bytes(), np.uint8)[tensor.offset :][: 512 * 256 // 32 * 18]
    expected = torch.from_numpy(values_of("iq4_nl", stored.reshape(-1, 18)).reshape(512, 256))
    assert_same(found["model.layers.0.mlp.up_proj.weight"], expected.bfloat16())


@pytest.mark.parametrize("wanted", MIXTURES)
def test_an_output_is_read_back_as_plain_weights_near_the_original(
    tmp_path: Path, wanted: str
) -> None:
    source = write_llama(tmp_path / "hf", hidden=256, ffn=512, layers=4)
    options = {"gguf_type": wanted, "tokenizer": "none"}
    megaconv.convert(source, tmp_path / "out", saver="gguf", options=options, verify=True)
    assert megaconv.verify(tmp_path / "out").same
    megaconv.convert(tmp_path / "out/model.gguf", tmp_path / "back", saver="hf", config=source)
    given = load_tensors(source / "model.safetensors")
    found = load_tensors(tmp_path / "back/model.safetensors")
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        off = (found[name].float() - tensor.float()).norm()
        assert off <= 0.12 * tensor.float().norm(), name
        assert found[name].dtype == torch.bfloat16


def types_in(path: Path) -> dict[str, str]:
    return {name: each.dtype for name, each in gguf_header.read(path).tensors.items()}


def test_a_mixture_gives_more_bits_to_the_matrices_that_llama_cpp_gives_them_to(
    tmp_path: Path,
) -> None:
    source = write_llama(tmp_path / "hf", hidden=256, ffn=512, layers=8)
    options = {"gguf_type": "q4_k_m", "tokenizer": "none"}
    megaconv.convert(source, tmp_path / "out", saver="gguf", options=options)
    found = types_in(tmp_path / "out/model.gguf")
    assert found["output.weight"] == "q6_k"
    assert found["token_embd.weight"] == "q4_k"
    # use_more_bits of llama.cpp for 8 layers: the first, the last, and each third one between them.
    for layer in range(8):
        expected = "q6_k" if layer in (0, 3, 6, 7) else "q4_k"
        assert found[f"blk.{layer}.attn_v.weight"] == expected, layer
        assert found[f"blk.{layer}.ffn_down.weight"] == expected, layer
        assert found[f"blk.{layer}.ffn_up.weight"] == "q4_k"
        assert found[f"blk.{layer}.attn_norm.weight"] == "float32"
    keys = gguf_header.read(tmp_path / "out/model.gguf").keys
    assert keys["general.file_type"] == 15


def test_rows_that_are_no_whole_blocks_get_the_next_type(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "hf", hidden=256, ffn=288, layers=1)
    options = {"gguf_type": "q6_k", "tokenizer": "none"}
    megaconv.convert(source, tmp_path / "out", saver="gguf", options=options, verify=True)
    found = types_in(tmp_path / "out/model.gguf")
    assert found["blk.0.ffn_down.weight"] == "q8_0"
    assert found["blk.0.ffn_up.weight"] == "q6_k"
    recorded = json.loads((tmp_path / "out/megaconv.json").read_text())
    assert recorded["saver"] == "gguf"
