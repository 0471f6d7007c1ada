"""A tensor with a row for each token, such as an embedding, with other rows at its end or without its last rows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from formats.lazy_numpy import Doubles, np
from formats.tensor import ITEMSIZE, Box, Bytes, ComputedTensor, Shape, matrix_shape
from megaconv.values import rounding
from megaconv.values.scaled import read_bytes

_BLOCK_BYTES = 1 << 20
"""Bytes of float64 numbers that are added up at a time. The sum of all rows depends on it, and on nothing else."""


@dataclass(frozen=True)
class ResizedTensor(ComputedTensor):
    """The first rows of a tensor (`source`), and new rows behind them, in its dtype.

    A new row is the mean of all rows of the source, or of some; it is computed in float64 and rounded as torch does.
    """

    rows: int
    """Rows of the result."""
    pieces: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """New row -> the rows that it is the mean of. A row that isn't listed is the mean of all."""
    zero: bool = False
    """True if new rows are zeros instead."""
    filled: Collection[int] = ()
    """Rows of the source that are new too: they get the values of new rows."""

    @property
    def shape(self) -> Shape:
        return (self.rows, *self.source.shape[1:])

    def read_into(self, box: Box, out: Bytes) -> None:
        kept = max(0, min(box.row1, self._stored_rows) - box.row0)
        if kept:
            rows = Box(box.row0, box.row0 + kept, box.col0, box.col1)
            self.source.read_into(rows, out[:kept])
        new = [row for row in range(box.row0, box.row0 + kept) if row in self.filled]
        new += range(box.row0 + kept, box.row1)
        if not new:
            return
        itemsize = ITEMSIZE[self.dtype]
        usual = 0 if self.zero else self._mean[box.col0 * itemsize : box.col1 * itemsize]
        for row in new:
            out[row - box.row0] = usual
        self._fill_from_pieces(box, [row for row in new if row in self.pieces], out)

    def _fill_from_pieces(self, box: Box, rows: Sequence[int], out: Bytes) -> None:
        """Fill those of the new rows in a rectangle that are the mean of some stored rows."""
        means = {row: self.pieces[row] for row in rows}
        wanted = sorted({piece for pieces in means.values() for piece in pieces})
        if not wanted:
            return
        stored = np.empty((len(wanted), box.cols * ITEMSIZE[self.dtype]), np.uint8)
        for index, piece in enumerate(wanted):
            stored_row = Box(piece, piece + 1, box.col0, box.col1)
            self.source.read_into(stored_row, stored[index : index + 1])
        numbers = dict(zip(wanted, self._numbers(stored), strict=True))
        for row, pieces in means.items():
            total = np.zeros(box.cols, np.float64)
            for piece in pieces:
                total += numbers[piece]
            np.copyto(out[row - box.row0], self._rounded(total / len(pieces)))

    @property
    def _stored_rows(self) -> int:
        return self.source.shape[0]

    @cached_property
    def _mean(self) -> Bytes:
        """The bytes of the mean of all rows."""
        cols = matrix_shape(self.shape)[1]
        step = max(1, _BLOCK_BYTES // (8 * cols))
        total = np.zeros(cols, np.float64)
        for row in range(0, self._stored_rows, step):
            block = Box(row, min(row + step, self._stored_rows), 0, cols)
            total += self._numbers(read_bytes(self.source, block, ITEMSIZE[self.dtype])).sum(0)
        return self._rounded(total / self._stored_rows)

    def _numbers(self, stored: Bytes) -> Doubles:
        """The bytes of stored rows in float64."""
        return rounding.numbers(stored.reshape(-1), self.dtype).reshape(len(stored), -1)

    def _rounded(self, row: Doubles) -> Bytes:
        # A mean is never beyond the range of its numbers.
        return rounding.of_doubles(row, self.dtype, overflow=True)
