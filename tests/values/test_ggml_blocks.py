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
from formats.gguf import BLOCK_TYPES
from megaconv.engine.stream import as_lazy
from megaconv.gguf.types import MIXTURES
from megaconv.values.ggml_blocks import BlockTensor, BlockValues, values_of
from megaconv.values.ggml_quantizers import QUANTIZERS
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.values.test_quantized import as_torch, assert_same, in_rectangles

STORED = load_file(FIXTURES / "ggml-blocks/blocks.safetensors")
NUMBERS = STORED["numbers"]


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_have_the_bytes_that_ggml_writes(kind: str) -> None:
    size, _ = BLOCK_TYPES[kind]
    made = QUANTIZERS[kind](NUMBERS.reshape(-1, size))
    is_same = (made == STORED[kind]).all(axis=1)
    assert is_same.all(), np.flatnonzero(~is_same)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_values_are_those_that_ggml_reads(kind: str) -> None:
    np.testing.assert_array_equal(
        values_of(kind, STORED[kind]).reshape(NUMBERS.shape), STORED[f"{kind}_values"]
    )


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_any_rectangle_has_the_same_bytes_and_the_same_values(kind: str) -> None:
    tensor = as_lazy(torch.from_numpy(NUMBERS))
    made = BlockTensor(tensor, kind)
    whole = as_torch(made)
    assert_same(in_rectangles(made, 5, 100), whole)
    values = BlockValues(as_lazy(whole), kind, NUMBERS.shape, "float32")
    assert_same(in_rectangles(values, 5, 77), torch.from_numpy(STORED[f"{kind}_values"]))


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
