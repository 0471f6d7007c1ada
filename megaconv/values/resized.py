"""A tensor with a row for each token, such as an embedding, with other rows at its end or without its last rows."""

from collections.abc import Mapping, Sequence
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

    @property
    def shape(self) -> Shape:
        return (self.rows, *self.source.shape[1:])

    def read_into(self, box: Box, out: Bytes) -> None:
        kept = max(0, min(box.row1, self._stored_rows) - box.row0)
        if kept:
            rows = Box(box.row0, box.row0 + kept, box.col0, box.col1)
            self.source.read_into(rows, out[:kept])
        for index in range(kept, box.rows):
            np.copyto(out[index], self._new_row(box.row0 + index, box.col0, box.col1))

    @property
    def _stored_rows(self) -> int:
        return self.source.shape[0]

    def _new_row(self, row: int, col0: int, col1: int) -> Bytes:
        """The bytes of some columns of a new row."""
        itemsize = ITEMSIZE[self.dtype]
        if self.zero:
            return np.zeros((col1 - col0) * itemsize, np.uint8)
        pieces = self.pieces.get(row, ())
        if not pieces:
            return self._mean[col0 * itemsize : col1 * itemsize]
        total = sum(self._numbers(Box(each, each + 1, col0, col1)).sum(0) for each in pieces)
        return self._rounded(total / len(pieces))

    @cached_property
    def _mean(self) -> Bytes:
        """The bytes of the mean of all rows."""
        cols = matrix_shape(self.shape)[1]
        step = max(1, _BLOCK_BYTES // (8 * cols))
        total = np.zeros(cols, np.float64)
        for row in range(0, self._stored_rows, step):
            total += self._numbers(Box(row, min(row + step, self._stored_rows), 0, cols)).sum(0)
        return self._rounded(total / self._stored_rows)

    def _numbers(self, box: Box) -> Doubles:
        """Stored rows in float64."""
        stored = read_bytes(self.source, box, ITEMSIZE[self.dtype])
        with np.errstate(invalid="ignore"):  # some NaN
            numbers = rounding.numbers(stored.reshape(-1), self.dtype)
        return numbers.reshape(box.rows, box.cols)

    def _rounded(self, row: Doubles) -> Bytes:
        made = np.empty(row.size * ITEMSIZE[self.dtype], np.uint8)
        if self.dtype == "float64":
            return row.view(np.uint8)
        # A mean is never beyond the range of its numbers.
        rounding.convert(row.view(np.uint8), "float64", made, self.dtype, overflow=True)
        return made
