"""Runs of elements as rectangles: against numpy's own reshaping."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.chunked import Chunk, ChunkedTensor
from formats.errors import CorruptCheckpoint
from formats.flat import narrowed, rectangles, unflatten
from formats.tensor import FileTensor, InputFile, LazyTensor, Shape, read_tensor
from tests.strategies import Draw

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@dataclass(frozen=True)
class Held:
    """A chunk in memory's place: a tensor in a file (formats.chunked.Stored)."""

    held: FileTensor

    def tensor(self) -> LazyTensor:
        return self.held


@st.composite
def cuts(draw: Draw, length: int) -> list[int]:
    """Where `length` elements are cut."""
    return [0, *sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) - {length}), length]


@given(shape=SHAPES, data=st.data())
def test_a_run_is_made_of_rectangles_that_hold_its_elements_in_order(shape: Shape, data: st.DataObject) -> None:
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    start = data.draw(st.integers(0, whole.size - 1))
    length = data.draw(st.integers(1, whole.size - start))
    found: list[int] = []
    for offset, sizes, first in rectangles(start, length, shape):
        piece = whole[tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))].reshape(-1)
        assert piece[0] == first
        found += piece.tolist()
    assert found == list(range(start, start + length))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> InputFile:
    """0, 1, 2 ... as float32."""
    path = tmp_path_factory.mktemp("flat") / "numbers"
    np.arange(4096, dtype=np.float32).tofile(path)
    return InputFile.open(path)


def vector(numbers: InputFile, edges: list[int]) -> ChunkedTensor:
    chunks = [
        Chunk.whole((first,), (last - first,), Held(FileTensor(numbers, 4 * first, (last - first,), "float32")))
        for first, last in pairwise(edges)
    ]
    return ChunkedTensor((edges[-1],), "float32", chunks)


def array(tensor: LazyTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return read_tensor(tensor).view(np.float32).reshape(tensor.shape)


@given(shape=SHAPES, before=st.integers(0, 9), after=st.integers(0, 9), data=st.data())
def test_a_parameter_is_found_in_a_vector_however_that_is_cut(
    numbers: InputFile, shape: Shape, before: int, after: int, data: st.DataObject
) -> None:
    size = int(np.prod(shape))
    flat = vector(numbers, data.draw(cuts(before + size + after)))
    wanted = np.arange(before, before + size, dtype=np.float32).reshape(shape)
    assert np.array_equal(array(narrowed(flat, before, shape)), wanted)
    assert np.array_equal(array(narrowed(vector(numbers, [0, 4096]), before, shape)), wanted)


@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=3), data=st.data())
def test_a_flattened_tensor_is_put_together_from_shards_that_are_cut_anywhere(
    numbers: InputFile, counts: list[int], data: st.DataObject
) -> None:
    """The same elements as a transposition that numpy makes: shards along each axis, then axes inside a shard."""
    shard = tuple(data.draw(st.integers(1, 4)) for _ in counts)
    length, chunks = int(np.prod(shard)), []
    for number, place in enumerate(np.ndindex(*counts)):
        edges = data.draw(cuts(length))
        for first, last in pairwise(edges):
            shape = (*(1,) * len(counts), last - first)
            stored = Held(FileTensor(numbers, 4 * (number * length + first), shape, "float32"))
            chunks.append(Chunk.whole((*place, first), shape, stored))
    shape = tuple(a * b for a, b in zip(counts, shard, strict=True))
    tensor = unflatten("key", ChunkedTensor((*counts, length), "float32", chunks), shape)
    apart = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(*counts, *shard)
    axes = [axis for pair in zip(range(len(counts)), range(len(counts), 2 * len(counts)), strict=True) for axis in pair]
    assert np.array_equal(array(tensor), apart.transpose(axes).reshape(shape))


def test_what_reaches_out_of_a_vector_or_fits_no_shape_is_refused(numbers: InputFile) -> None:
    flat = vector(numbers, [0, 7, 12])
    with pytest.raises(CorruptCheckpoint, match="elements 10 to 13"):
        narrowed(flat, 10, (3,))
    with pytest.raises(CorruptCheckpoint, match="key"):
        unflatten("key", flat, (3, 4))
    shards = ChunkedTensor((2, 1, 6), "float32", flat.chunks)
    with pytest.raises(CorruptCheckpoint, match="key"):
        unflatten("key", shards, (2, 4))
