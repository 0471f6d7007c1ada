"""Tensors of any number of axes that are stored as chunks: rectangles with an offset, each in its own place on the
disk.

`unstack` splits a stacked tensor [layers, experts, rows, cols] along its first axis into tensors that read only their
own bytes. Chunks may be irregular, come in any order and hold no element. Together they cover the tensor exactly once.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple, Protocol

from formats.errors import CorruptCheckpoint
from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, matrix_shape

_MOST_DIVIDED = 5
"""Maximum number of axes along which chunks divide a tensor. Checkpoints divide up to three."""


class Stored(Protocol):
    """The bytes of a chunk, which are located when they are first needed."""

    def tensor(self) -> LazyTensor:
        """The tensor of the chunk's shape and dtype. Raises CorruptCheckpoint if the file holds something else."""
        ...


class Chunk(NamedTuple):
    """A rectangle of a tensor. fixed: the index in the first axes of the stored chunk, after `unstack` has removed
    these axes."""

    offset: Shape
    shape: Shape
    stored: Stored
    stored_shape: Shape
    fixed: Shape = ()

    @classmethod
    def whole(cls, offset: Shape, shape: Shape, stored: Stored) -> "Chunk":
        return cls(offset, shape, stored, shape)


class Rectangle(NamedTuple):
    """A chunk, or a plane of it, in the matrix form of the tensor. row and col: the place of its first element in the
    chunk's own matrix.

    transposed: the tensor is a vector, which is one column. The stored chunk has more axes, and there the vector is a
    row.
    """

    box: Box
    row: int
    col: int
    transposed: bool
    stored: Stored

    def read_into(self, wanted: Box, out: Bytes) -> None:
        """Read a part of the rectangle. wanted: a box inside `box`."""
        if self.transposed:
            self._read_column(wanted, out)
            return
        row = self.row + wanted.row0 - self.box.row0
        col = self.col + wanted.col0 - self.box.col0
        stored_box = Box(row, row + wanted.rows, col, col + wanted.cols)
        self.stored.tensor().read_into(stored_box, out)

    def _read_column(self, wanted: Box, out: Bytes) -> None:
        """Read a part of a column that is stored as a row. The order of the elements is the same."""
        first = self.col + wanted.row0 - self.box.row0
        stored_box = Box(self.row, self.row + 1, first, first + wanted.rows)
        line = np.empty((1, out.size), np.uint8)
        self.stored.tensor().read_into(stored_box, line)
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
                # `out` has bytes as columns, so column numbers are multiplied by the size of an element.
                cols = slice(
                    (wanted.col0 - box.col0) * itemsize, (wanted.col1 - box.col0) * itemsize
                )
                part.read_into(wanted, out[wanted.row0 - box.row0 : wanted.row1 - box.row0, cols])

    def _overlapping(self, box: Box) -> Sequence[Rectangle]:
        if not self._rectangles:
            found = sorted(self._planes(), key=lambda part: part.box)
            self._tallest = max((part.box.rows for part in found), default=0)
            self._starts = [part.box.row0 for part in found]
            self._rectangles = found  # set last, since other threads test this field first
        # Sorted by first row. A rectangle that begins further above the box than the tallest height ends before it.
        first = bisect_right(self._starts, box.row0 - self._tallest)
        return self._rectangles[first : bisect_right(self._starts, box.row1 - 1)]

    def _planes(self) -> Iterator[Rectangle]:
        """Yield the planes of all chunks. A plane is the rectangle of a chunk's last two axes, for one index of the
        other axes."""
        for chunk in self.chunks:
            if not prod(chunk.shape):
                continue
            rows, cols = matrix_shape(chunk.shape[-2:])
            transposed = len(chunk.shape) == 1 and len(chunk.stored_shape) > 1
            leading_axes = map(range, chunk.shape[:-2])
            for index in product(*leading_axes):
                row0, col0 = self._corner(chunk, index)
                row, col = _corner_in_chunk(chunk, index)
                yield Rectangle(
                    box=Box(row0, row0 + rows, col0, col0 + cols),
                    row=row,
                    col=col,
                    transposed=transposed,
                    stored=chunk.stored,
                )

    def _corner(self, chunk: Chunk, index: tuple[int, ...]) -> tuple[int, int]:
        """(row, column) of a plane in the tensor's matrix. index: place of the plane on the chunk's leading axes."""
        if not chunk.shape:
            return 0, 0
        if len(chunk.shape) == 1:
            return chunk.offset[0], 0
        # A plane lies below all earlier planes of the tensor.
        plane = tuple(begin + at for begin, at in zip(chunk.offset, index, strict=False))
        rows_above = _ravel(plane, self.shape) * self.shape[-2]
        return rows_above + chunk.offset[-2], chunk.offset[-1]

    def unstack(self) -> "list[ChunkedTensor]":
        """The tensors along the first axis. Raises CorruptCheckpoint for a scalar."""
        if not self.shape:
            raise CorruptCheckpoint("a scalar can't be unstacked")
        slices: list[list[Chunk]] = [[] for _ in range(self.shape[0])]
        for chunk in self.chunks:
            first = chunk.offset[0]
            offset = chunk.offset[1:]
            shape = chunk.shape[1:]
            for index in range(chunk.shape[0]):
                fixed = (*chunk.fixed, index)
                inner = Chunk(offset, shape, chunk.stored, chunk.stored_shape, fixed)
                slices[first + index].append(inner)
        return [ChunkedTensor(self.shape[1:], self.dtype, chunks) for chunks in slices]


def joined(first: ChunkedTensor, second: ChunkedTensor) -> ChunkedTensor:
    """Two tensors joined along the first axis. Raises CorruptCheckpoint if their other axes or dtypes differ."""
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype or not first.shape:
        raise CorruptCheckpoint(
            f"{list(first.shape)} {first.dtype} and {list(second.shape)} {second.dtype} don't fit"
        )
    rows_above, *others = first.shape
    chunks = list(first.chunks)
    for chunk in second.chunks:
        row, *rest = chunk.offset
        below = (rows_above + row, *rest)
        chunks.append(chunk._replace(offset=below))
    shape = (rows_above + second.shape[0], *others)
    return ChunkedTensor(shape, first.dtype, chunks)


def _corner_in_chunk(chunk: Chunk, index: tuple[int, ...]) -> tuple[int, int]:
    """(row, column) of a plane in the stored chunk, which also has the axes that `unstack` removed."""
    place = (*chunk.fixed, *index, *(0,) * min(2, len(chunk.shape)))
    if len(place) > 1:
        return _ravel(place[:-1], chunk.stored_shape), place[-1]
    return _ravel(place, chunk.stored_shape), 0


def _ravel(index: Shape, shape: Shape) -> int:
    """The row-major number of an element over the first len(index) axes. With a shorter index, the number of rows
    before it."""
    number = 0
    for place, size in zip(index, shape, strict=False):
        number = number * size + place
    return number


def require_cover(what: str, shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> None:
    """Raise CorruptCheckpoint unless rectangles (offset, shape) cover a tensor exactly once. what: the tensor's name in
    messages."""
    if _is_grid(shape, boxes):
        return
    filled = [(offset, sizes) for offset, sizes in boxes if 0 not in sizes]
    for offset, sizes in boxes:
        if len(offset) != len(shape) or len(sizes) != len(shape):
            raise CorruptCheckpoint(
                f"{what}: a chunk has {len(offset)} axes, the tensor {len(shape)}"
            )
        if any(
            first + size > whole for first, size, whole in zip(offset, sizes, shape, strict=True)
        ):
            found = (
                f"a chunk {list(sizes)} at {list(offset)} reaches out of the tensor {list(shape)}"
            )
            raise CorruptCheckpoint(f"{what}: {found}; save the checkpoint again")
    total = prod(shape)
    held = sum([prod(sizes) for _, sizes in filled])
    if held < total:
        raise CorruptCheckpoint(
            f"{what}: its chunks hold {held} of {total} elements; a part is missing"
        )
    if held > total or (total and not _covers_once(what, shape, filled)):
        raise CorruptCheckpoint(f"{what}: its chunks overlap; save the checkpoint again")


def _is_grid(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """True if all chunks have one shape and fill a regular grid. This is the common case, and fast to check."""
    step: Shape = boxes[0][1] if boxes else ()
    if (
        len(step) != len(shape)
        or 0 in step
        or any(whole % size for whole, size in zip(shape, step, strict=True))
    ):
        return False
    if len(boxes) != prod(shape) // prod(step):
        return False
    corners = set(
        product(*(range(0, whole, size) for whole, size in zip(shape, step, strict=True)))
    )
    for offset, sizes in boxes:
        # A file can choose offsets of one hash, but not corners: looking them up among these is fast.
        if sizes != step or offset not in corners:
            return False
        corners.remove(offset)
    return True


def _covers_once(what: str, shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """True if rectangles inside a tensor cover it exactly once.

    Each rectangle counts 1 for its elements. The counts of all rectangles are those of the tensor exactly if both have
    the same differences along all axes. The differences of a rectangle are 1 and -1 in turn, at its corners, and 0
    elsewhere. Raises CorruptCheckpoint if too many axes are divided.
    """
    offsets, sizes = zip(*boxes, strict=True)
    starts = np.array([*offsets, (0,) * len(shape)], np.int64)
    ends = starts + np.array([*sizes, shape], np.int64)
    is_divided = (starts > 0).any(axis=0) | (ends < ends[-1]).any(axis=0)
    axes = np.flatnonzero(is_divided)
    if len(axes) > _MOST_DIVIDED:
        raise CorruptCheckpoint(f"{what}: its chunks divide more than {_MOST_DIVIDED} axes")
    if not len(axes):
        return len(boxes) == 1
    return not _differences(starts[:, axes], ends[:, axes]).any()


def _differences(starts: Any, ends: Any) -> Any:
    """The differences of the counts along all axes, at each corner. starts, ends: of the rectangles, then of the tensor."""
    counts = np.ones(len(starts), np.int64)
    counts[-1] = -1  # the tensor itself
    corners, signed = [], []
    for at_end in product((False, True), repeat=starts.shape[1]):
        is_odd = sum(at_end) % 2
        corners.append(np.where(at_end, ends, starts))
        signed.append(-counts if is_odd else counts)
    return _sums(np.concatenate(corners), np.concatenate(signed))


def _sums(keys: Any, values: Any) -> Any:
    """The sum of the values of each key. keys: an array of [number, axes]."""
    order = np.lexsort(keys.T)
    keys, values = keys[order], values[order]
    is_first = np.ones(len(keys), bool)
    is_first[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    return np.add.reduceat(values, np.flatnonzero(is_first))
