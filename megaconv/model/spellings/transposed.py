"""Canonical tensors as columns: single ones as in GPT-2's Conv1D, or all of a rank's experts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape
from megaconv.model.patterns import evaluate
from megaconv.model.pieces import Pieces, Template
from megaconv.model.rank import Rank
from megaconv.model.regions import NativeOutput, NativeTensor, Order, Region
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class AsColumns(Order):
    """Rows of the canonical tensor are columns of the native tensor."""

    transposed: ClassVar[bool] = True

    def read(self, region: Region, wanted: Box, native: LazyTensor, out: Bytes) -> None:
        box, itemsize = _flipped(region, wanted), ITEMSIZE[native.dtype]
        columns = np.empty((box.rows, box.cols * itemsize), np.uint8)
        native.read_into(box, columns)
        _copy_transposed(columns, out, itemsize)

    def write(self, region: Region, wanted: Box, native: NativeOutput, rows: Bytes) -> None:
        box = _flipped(region, wanted)
        columns = native.scratch(box)
        _copy_transposed(rows, columns, native.itemsize)
        native.write(box, columns)

    def filled(self, region: Region) -> Iterator[Box]:
        yield _flipped(region, region.box)


AS_COLUMNS = AsColumns()


def _flipped(region: Region, wanted: Box) -> Box:
    """The rectangle of the native tensor that holds a rectangle of the canonical tensor as columns."""
    row = region.row + wanted.col0 - region.box.col0
    col = region.col + wanted.row0 - region.box.row0
    return Box(row, row + wanted.cols, col, col + wanted.rows)


def _copy_transposed(rows: Bytes, out: Bytes, itemsize: int) -> None:
    """Copy a matrix [rows, cols * itemsize] to its transpose [cols, rows * itemsize]."""
    element = np.dtype((np.void, itemsize))
    np.copyto(out.view(element), rows.view(element).T)


@dataclass(frozen=True)
class _SideBySide(Separate):
    """Canonical tensors side by side as columns. Experts are blocks of rows below each other."""

    joins: ClassVar[bool] = True

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        shards = pieces.shards()
        experts = pieces.of_each_expert(shards)
        inputs = shards[0].box.cols
        parts: dict[str, tuple[Region, ...]] = {}
        row = col = 0
        for names in experts:
            col = 0
            for name, shard in zip(names, shards, strict=True):
                parts[name] = (Region(shard.box, row, col, AS_COLUMNS),)
                col += shard.box.rows
            row += inputs
        view = (row, col)
        shape = self._declared(pieces.rank) or view
        yield Template(
            NativeTensor(self.name, parts, shape, of_experts=pieces.of_experts, view=view)
        )

    def _declared(self, rank: Rank) -> Shape:
        """The tensor's declared shape; empty if it is the shape of the joined matrix."""
        del rank
        return ()


@dataclass(frozen=True)
class Transposed(_SideBySide):
    """Canonical tensors side by side as columns, [in, out], as in GPT-2's Conv1D."""


@dataclass(frozen=True)
class StackedTransposed(_SideBySide):
    """All experts of a rank in one native tensor, each as the transpose of its joined pieces.

    The memory is [experts, in, out]. `shape` is the tensor's declared shape: the same memory with other axes.
    """

    shape: str

    holds_all_experts: ClassVar[bool] = True

    def _declared(self, rank: Rank) -> Shape:
        return evaluate(self.shape, rank.sizes)
