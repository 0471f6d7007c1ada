"""Tensors over chunks: any number of axes, any chunks that cover them, read rectangle by rectangle."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.chunked import Chunk, ChunkedTensor, joined, require_cover
from formats.errors import CorruptCheckpoint
from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape, reshaped

Boxes = list[tuple[Shape, Shape]]


@dataclass
class Held:
    """A stored chunk in memory: its own lazy tensor."""

    array: np.ndarray[Any, Any]

    def tensor(self) -> "Held":
        return self

    @property
    def shape(self) -> Shape:
        return self.array.shape

    dtype = "int32"

    def read_into(self, box: Box, out: Bytes) -> None:
        rows = self.array.reshape(matrix_shape(self.array.shape))[
            box.row0 : box.row1, box.col0 : box.col1
        ]
        out[:] = np.ascontiguousarray(rows).view(np.uint8)


def cut_up(
    draw: st.DrawFn, offset: Shape, shape: Shape, cuts: int = 3
) -> Iterator[tuple[Shape, Shape]]:
    """A rectangle as irregular chunks: parted along one axis after another, at random."""
    axis = draw(st.integers(-1, len(shape) - 1)) if shape and cuts else -1
    if axis < 0:
        yield offset, shape
        return
    at = draw(st.integers(0, shape[axis]))
    yield from cut_up(draw, offset, (*shape[:axis], at, *shape[axis + 1 :]), cuts - 1)
    behind = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
    yield from cut_up(draw, behind, (*shape[:axis], shape[axis] - at, *shape[axis + 1 :]), cuts - 1)


@st.composite
def chunked(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], Boxes]:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    return array, draw(st.permutations(list(cut_up(draw, (0,) * len(shape), shape))))


def tensor_of(array: np.ndarray[Any, Any], boxes: Boxes) -> ChunkedTensor:
    def part(offset: Shape, shape: Shape) -> np.ndarray[Any, Any]:
        return np.array(array[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))])

    chunks = [Chunk.whole(offset, shape, Held(part(offset, shape))) for offset, shape in boxes]  # type: ignore[arg-type]
    return ChunkedTensor(array.shape, "int32", chunks)


def read(tensor: LazyTensor, box: Box | None = None) -> np.ndarray[Any, Any]:
    rows, cols = matrix_shape(tensor.shape)
    box = box or Box(0, rows, 0, cols)
    out = np.full((box.rows, 4 * box.cols), 255, np.uint8)
    tensor.read_into(box, out)
    return out.view(np.int32)


@settings(deadline=None)
@given(chunked(), st.data())
def test_any_rectangle_of_any_chunks_is_read(
    case: tuple[np.ndarray[Any, Any], Boxes], data: st.DataObject
) -> None:
    array, boxes = case
    require_cover("tensor", array.shape, boxes)
    matrix = array.reshape(matrix_shape(array.shape))
    row0, col0 = (data.draw(st.integers(0, size - 1)) for size in matrix.shape)
    row1, col1 = (
        data.draw(st.integers(row0 + 1, matrix.shape[0])),
        data.draw(st.integers(col0 + 1, matrix.shape[1])),
    )
    found = read(tensor_of(array, boxes), Box(row0, row1, col0, col1))
    assert np.array_equal(found, matrix[row0:row1, col0:col1])


@settings(deadline=None)
@given(chunked())
def test_unstacking_a_tensor_keeps_its_elements(
    case: tuple[np.ndarray[Any, Any], Boxes],
) -> None:
    array, boxes = case
    pairs = [(array, tensor_of(array, boxes))]
    while pairs[0][0].shape:
        pairs = [
            (a, t) for whole, tensor in pairs for a, t in zip(whole, tensor.unstack(), strict=True)
        ]
        for expected, found in pairs:
            expected = np.asarray(expected)
            assert found.shape == expected.shape
            assert np.array_equal(read(found), expected.reshape(matrix_shape(expected.shape)))


@settings(deadline=None)
@given(chunked())
def test_a_chunk_that_is_missing_doubled_or_moved_is_noticed(
    case: tuple[np.ndarray[Any, Any], Boxes],
) -> None:
    array, boxes = case
    filled = [box for box in boxes if 0 not in box[1]]
    with pytest.raises(CorruptCheckpoint, match=r"tensor: .*missing"):
        require_cover("tensor", array.shape, filled[1:])
    with pytest.raises(CorruptCheckpoint, match=r"tensor: .*overlap"):
        require_cover("tensor", array.shape, [*filled, filled[0]])
    if array.shape:
        (first, *rest), sizes = filled[0]
        with pytest.raises(CorruptCheckpoint, match=r"tensor: .*(overlap|out of the tensor)"):
            require_cover("tensor", array.shape, [((first + 1, *rest), sizes), *filled[1:]])


def test_chunks_that_overlap_and_leave_a_hole_of_the_same_size_are_noticed() -> None:
    with pytest.raises(CorruptCheckpoint, match="overlap"):
        require_cover("tensor", (4, 2), [((0, 0), (2, 2)), ((1, 0), (2, 2))])


def test_many_chunks_in_steps_are_checked_in_time_by_their_number() -> None:
    """A column from the diagonal down, and the rest of the column above it: each chunk lies beside all others."""
    count = 10_000
    below = [((row, row), (count - row, 1)) for row in range(count)]
    above = [((0, row), (row, 1)) for row in range(1, count)]
    start = time.process_time()
    require_cover("tensor", (count, count), below + above)
    moved = ((1, 3), (3, 1))  # a row lower than above[2]
    with pytest.raises(CorruptCheckpoint, match="overlap"):
        require_cover("tensor", (count, count), [*below, *above[:2], moved, *above[3:]])
    assert time.process_time() - start < 5


def test_chunks_of_six_axes_are_refused() -> None:
    halves = [(at, (1,) * 6) for at in product((0, 1), repeat=6)]
    require_cover("tensor", (2,) * 6, halves)
    joined_pair = [((0,) * 6, (1, 1, 1, 1, 1, 2)), *(each for each in halves if any(each[0][:5]))]
    with pytest.raises(CorruptCheckpoint, match="divide more than 5 axes"):
        require_cover("tensor", (2,) * 6, joined_pair)


def test_joined_tensors_lie_one_under_the_other() -> None:
    first, second = (
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.arange(9, dtype=np.int32).reshape(3, 3),
    )
    both = joined(
        tensor_of(first, [((0, 0), (2, 3))]),
        tensor_of(second, [((0, 0), (1, 3)), ((1, 0), (2, 3))]),
    )
    assert np.array_equal(read(both), np.concatenate([first, second]))
    with pytest.raises(CorruptCheckpoint, match="don't fit"):
        joined(tensor_of(first, [((0, 0), (2, 3))]), tensor_of(first.T, [((0, 0), (3, 2))]))


@settings(deadline=None)
@given(chunked(), st.data())
def test_chunks_are_read_under_any_other_shape(
    case: tuple[np.ndarray[Any, Any], Boxes], data: st.DataObject
) -> None:
    """GPT-2's transposed matrices and stacked experts are read in this way: their own shape counts rows and
    columns."""
    array, boxes = case
    cols = data.draw(
        st.sampled_from([size for size in range(1, array.size + 1) if array.size % size == 0])
    )
    matrix = array.reshape(-1, cols)
    row0, col0 = (data.draw(st.integers(0, size - 1)) for size in matrix.shape)
    row1, col1 = (
        data.draw(st.integers(row0 + 1, len(matrix))),
        data.draw(st.integers(col0 + 1, cols)),
    )
    found = read(reshaped(tensor_of(array, boxes), matrix.shape), Box(row0, row1, col0, col1))
    assert np.array_equal(found, matrix[row0:row1, col0:col1])
