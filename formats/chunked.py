"""Tensors of any number of axes that are stored as chunks: rectangles with an offset, each somewhere else on the disk.

A stacked tensor [layers, experts, rows, cols] can be split along its first axis (`unstack`) into tensors that read nothing
but their own bytes. Chunks may be irregular, come in any order and hold no element at all; together they cover the
tensor exactly once.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import NamedTuple, Protocol

from formats.errors import CorruptCheckpoint
from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, matrix_shape


class Stored(Protocol):
    """A chunk's own bytes, found when they are first needed."""

    def tensor(self) -> LazyTensor:
        """Of the chunk's shape and dtype. Raises CorruptCheckpoint if that isn't what lies there."""
        ...


class Chunk(NamedTuple):
    """A rectangle of a tensor. fixed: the place in the stored chunk's first axes, once these have been taken off."""

    offset: Shape
    shape: Shape
    stored: Stored
    stored_shape: Shape
    fixed: Shape = ()

    @classmethod
    def whole(cls, offset: Shape, shape: Shape, stored: Stored) -> "Chunk":
        return cls(offset, shape, stored, shape)


class Rectangle(NamedTuple):
    """A chunk, or a plane of it, in the matrix that the tensor is seen as; row and col: of its first element in the chunk's
    own matrix.

    transposed: the tensor is a vector, one column; the stored chunk has more axes, and there it is a row.
    """

    box: Box
    row: int
    col: int
    transposed: bool
    stored: Stored

    def read_into(self, wanted: Box, out: Bytes) -> None:
        """wanted: inside box."""
        row, col = self.row + wanted.row0 - self.box.row0, self.col + wanted.col0 - self.box.col0
        if not self.transposed:
            self.stored.tensor().read_into(Box(row, row + wanted.rows, col, col + wanted.cols), out)
            return
        # Our column is a part of one row there: read it as a row, whose elements then lie in the order that a column wants.
        first = self.col + wanted.row0 - self.box.row0
        line = np.empty((1, out.size), np.uint8)
        self.stored.tensor().read_into(Box(self.row, self.row + 1, first, first + wanted.rows), line)
        np.copyto(out, line.reshape(out.shape))


@dataclass
class ChunkedTensor:
    """A lazy tensor over chunks that cover it exactly once (see `require_cover`)."""

    shape: Shape
    dtype: str
    chunks: Sequence[Chunk]
    _rectangles: list[Rectangle] = field(default_factory=list, repr=False)
    _starts: list[int] = field(default_factory=list, repr=False)
    _tallest: int = 0

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize = ITEMSIZE[self.dtype]
        for part in self._overlapping(box):
            wanted = Box(
                max(part.box.row0, box.row0), min(part.box.row1, box.row1),
                max(part.box.col0, box.col0), min(part.box.col1, box.col1),
            )  # fmt: skip
            if wanted.rows > 0 and wanted.cols > 0:
                cols = slice((wanted.col0 - box.col0) * itemsize, (wanted.col1 - box.col0) * itemsize)
                part.read_into(wanted, out[wanted.row0 - box.row0 : wanted.row1 - box.row0, cols])

    def _overlapping(self, box: Box) -> Sequence[Rectangle]:
        if not self._rectangles:
            found = sorted(self._planes(), key=lambda part: part.box)
            self._tallest = max((part.box.rows for part in found), default=0)
            self._starts = [part.box.row0 for part in found]
            self._rectangles = found  # last: other threads look at it first
        # Sorted by first row: what begins further up than the tallest one reaches ends before the box.
        first = bisect_right(self._starts, box.row0 - self._tallest)
        return self._rectangles[first : bisect_right(self._starts, box.row1 - 1)]

    def _planes(self) -> Iterator[Rectangle]:
        """A chunk's last two axes are a rectangle of the matrix, its plane; there is one for each index of the axes before."""
        plane_rows = self.shape[-2] if len(self.shape) > 1 else 1
        for chunk in self.chunks:
            if not prod(chunk.shape):
                continue
            rows, cols = matrix_shape(chunk.shape[-2:])
            transposed = len(chunk.shape) == 1 and len(chunk.stored_shape) > 1
            for index in product(*map(range, chunk.shape[:-2])):
                # Its place in the tensor's matrix: below all earlier planes, and as far down and right as the chunk begins.
                plane = tuple(begin + at for begin, at in zip(chunk.offset, index, strict=False))
                row0, col0 = _ravel(plane, self.shape) * plane_rows, 0
                if len(chunk.shape) > 1:
                    row0, col0 = row0 + chunk.offset[-2], chunk.offset[-1]
                elif len(chunk.shape) == 1:
                    row0 = chunk.offset[0]
                # Its place in the chunk as stored, which has the axes that `unstack` took off besides.
                stored = (*chunk.fixed, *index, *(0,) * min(2, len(chunk.shape)))
                before, col = (stored[:-1], stored[-1]) if len(stored) > 1 else (stored, 0)
                row = _ravel(before, chunk.stored_shape)
                yield Rectangle(Box(row0, row0 + rows, col0, col0 + cols), row, col, transposed, chunk.stored)

    def unstack(self) -> "list[ChunkedTensor]":
        """The tensors along the first axis. Raises CorruptCheckpoint for a scalar."""
        if not self.shape:
            raise CorruptCheckpoint("a scalar can't be unstacked")
        slices: list[list[Chunk]] = [[] for _ in range(self.shape[0])]
        for chunk in self.chunks:
            first, offset, shape = chunk.offset[0], chunk.offset[1:], chunk.shape[1:]
            for index in range(chunk.shape[0]):
                inner = Chunk(offset, shape, chunk.stored, chunk.stored_shape, (*chunk.fixed, index))
                slices[first + index].append(inner)
        return [ChunkedTensor(self.shape[1:], self.dtype, chunks) for chunks in slices]


def joined(first: ChunkedTensor, second: ChunkedTensor) -> ChunkedTensor:
    """One tensor under the other, along the first axis. Raises CorruptCheckpoint when they don't fit."""
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype or not first.shape:
        raise CorruptCheckpoint(f"{list(first.shape)} {first.dtype} and {list(second.shape)} {second.dtype} don't fit")
    below = [chunk._replace(offset=(chunk.offset[0] + first.shape[0], *chunk.offset[1:])) for chunk in second.chunks]
    shape = (first.shape[0] + second.shape[0], *first.shape[1:])
    return ChunkedTensor(shape, first.dtype, [*first.chunks, *below])


def _ravel(index: Shape, shape: Shape) -> int:
    """The number of an element, or of the rows before it, in row-major order over the first len(index) axes."""
    number = 0
    for place, size in zip(index, shape, strict=False):
        number = number * size + place
    return number


def require_cover(what: str, shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise CorruptCheckpoint unless rectangles (offset, shape) cover a tensor exactly once. what: names it in messages."""
    if _is_grid(shape, boxes):
        return
    filled = [(offset, sizes) for offset, sizes in boxes if 0 not in sizes]
    for offset, sizes in boxes:
        if len(offset) != len(shape) or len(sizes) != len(shape):
            raise CorruptCheckpoint(f"{what}: a chunk has {len(offset)} axes, the tensor {len(shape)}")
        if any(first + size > whole for first, size, whole in zip(offset, sizes, shape, strict=True)):
            found = f"a chunk {list(sizes)} at {list(offset)} reaches out of the tensor {list(shape)}"
            raise CorruptCheckpoint(f"{what}: {found}; save the checkpoint again")
    total = prod(shape)
    held = sum([prod(sizes) for _, sizes in filled])
    if held < total:
        raise CorruptCheckpoint(f"{what}: its chunks hold {held} of {total} elements; a part is missing")
    if held > total or (total and not _disjoint(filled, 0)):
        raise CorruptCheckpoint(f"{what}: its chunks overlap; save the checkpoint again")


def _is_grid(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether all chunks are of one shape and fill a regular grid: the common case, found quickly."""
    step: Shape = boxes[0][1] if boxes else ()
    if len(step) != len(shape) or 0 in step or any(whole % size for whole, size in zip(shape, step, strict=True)):
        return False
    if len(boxes) != prod(shape) // prod(step):
        return False
    corners = set(product(*(range(0, whole, size) for whole, size in zip(shape, step, strict=True))))
    return {sizes for _, sizes in boxes} == {step} and {offset for offset, _ in boxes} == corners


def _disjoint(boxes: Sequence[tuple[Shape, Shape]], axis: int) -> bool:
    """Whether no two rectangles of a list overlap: slab by slab along one axis, within each along the next."""
    if len(boxes) < 2:
        return True
    if axis == len(boxes[0][0]):
        return False
    # Slabs begin where some rectangle begins. Two that overlap share the slab in which the later one begins.
    edges = sorted({offset[axis] for offset, _ in boxes})
    slabs: list[list[tuple[Shape, Shape]]] = [[] for _ in edges]
    for box in boxes:
        first, last = box[0][axis], box[0][axis] + box[1][axis]
        index = bisect_right(edges, first) - 1
        while index < len(edges) and edges[index] < last:
            slabs[index].append(box)
            index += 1
    return all(_disjoint(slab, axis + 1) for slab in slabs)
