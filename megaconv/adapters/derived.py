"""Parts and joins of an adapter's matrices as lazy tensors, which translate between layouts of modules."""

from collections.abc import Iterable
from dataclasses import dataclass

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, matrix_shape, row_blocks
from megaconv.model.assembled import window

_COMPARED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Transposed:
    """The transpose of a matrix."""

    source: LazyTensor

    @property
    def shape(self) -> Shape:
        rows, cols = self.source.shape
        return cols, rows

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read_into(self, box: Box, out: Bytes) -> None:
        item = np.dtype((np.void, ITEMSIZE[self.dtype]))
        read = np.empty((box.cols, box.rows * item.itemsize), np.uint8)
        self.source.read_into(Box(box.col0, box.col1, box.row0, box.row1), read)
        np.copyto(out, np.ascontiguousarray(read.view(item).T).view(np.uint8))


@dataclass(frozen=True)
class EveryNth:
    """The columns first, first + step ... of a matrix."""

    source: LazyTensor
    first: int
    step: int

    @property
    def shape(self) -> Shape:
        rows, cols = self.source.shape
        return rows, cols // self.step

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read_into(self, box: Box, out: Bytes) -> None:
        item = np.dtype((np.void, ITEMSIZE[self.dtype]))
        first, last = box.col0 * self.step + self.first, (box.col1 - 1) * self.step + self.first + 1
        read = np.empty((box.rows, (last - first) * item.itemsize), np.uint8)
        self.source.read_into(Box(box.row0, box.row1, first, last), read)
        np.copyto(out, np.ascontiguousarray(read.view(item)[:, :: self.step]).view(np.uint8))


@dataclass(frozen=True)
class Window:
    """A matrix of zeros with a tensor placed at (row, col). Without a tensor, all elements are zero."""

    shape: Shape
    dtype: str
    source: LazyTensor | None = None
    row: int = 0
    col: int = 0

    def read_into(self, box: Box, out: Bytes) -> None:
        out[:] = 0  # zero has all bits 0 in every dtype
        self.add_into(box, out)

    def add_into(self, box: Box, out: Bytes) -> None:
        """Write the tensor's own elements. The rest of `out` stays unchanged."""
        if self.source is None:
            return
        rows, cols = matrix_shape(self.source.shape)
        part = Box(
            row0=max(box.row0, self.row),
            row1=min(box.row1, self.row + rows),
            col0=max(box.col0, self.col),
            col1=min(box.col1, self.col + cols),
        )
        if part.rows <= 0 or part.cols <= 0:
            return
        stored = Box(
            row0=part.row0 - self.row,
            row1=part.row1 - self.row,
            col0=part.col0 - self.col,
            col1=part.col1 - self.col,
        )
        self.source.read_into(stored, window(out, box, part, ITEMSIZE[self.dtype]))


@dataclass(frozen=True)
class Stack:
    """Matrices one below the other, followed by rows of zeros."""

    sources: tuple[LazyTensor, ...]
    rows: int

    @property
    def shape(self) -> Shape:
        return self.rows, self.sources[0].shape[1]

    @property
    def dtype(self) -> str:
        return self.sources[0].dtype

    def read_into(self, box: Box, out: Bytes) -> None:
        out[:] = 0
        row = 0
        for source in self.sources:
            Window(self.shape, self.dtype, source, row).add_into(box, out)
            row += source.shape[0]


def are_equal(tensors: Iterable[LazyTensor]) -> bool:
    """True if all tensors have the same bits. Stops reading at the first difference."""
    first, *others = tensors
    if any((tuple(each.shape), each.dtype) != (tuple(first.shape), first.dtype) for each in others):
        return False
    return all(
        np.array_equal(_read(first, box), _read(other, box))
        for other in others
        for box in row_blocks(tuple(first.shape), first.dtype, _COMPARED_AT_ONCE)
    )


def _read(tensor: LazyTensor, box: Box) -> Bytes:
    found = np.empty((box.rows, box.cols * ITEMSIZE[tensor.dtype]), np.uint8)
    tensor.read_into(box, found)
    return found
