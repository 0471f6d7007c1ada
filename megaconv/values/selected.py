"""Some rows or columns of a tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

from formats.lazy_numpy import Counts, np
from formats.tensor import ITEMSIZE, Box, Bytes, ComputedTensor, Shape
from megaconv.values.scaled import read_bytes

_READ_BYTES = 4 << 20
"""Bytes of the other tensor that are read at a time, or one row."""


@dataclass(frozen=True)
class SelectedRows(ComputedTensor):
    """Rows of another tensor (`source`), which has one or two axes."""

    rows: Sequence[int]
    """Their numbers in the other tensor, in rising order."""

    @property
    def shape(self) -> Shape:
        return (len(self.rows), *self.source.shape[1:])

    def read_into(self, box: Box, out: Bytes) -> None:
        row = box.row0
        while row < box.row1:
            count = self._together(row, box)
            wanted = self.rows[row : row + count]
            band = Box(wanted[0], wanted[-1] + 1, box.col0, box.col1)
            read = read_bytes(self.source, band, ITEMSIZE[self.dtype])
            first = row - box.row0
            out[first : first + count] = read[[each - wanted[0] for each in wanted]]
            row += count

    def _together(self, row: int, box: Box) -> int:
        """The number of rows from `row` on that are read at once: at least half of the rows that are read are among them."""
        most = max(1, _READ_BYTES // max(1, box.cols * ITEMSIZE[self.dtype]))
        count = 1
        for end in range(row + 1, box.row1):
            band = self.rows[end] + 1 - self.rows[row]
            if band > most or band > 2 * (count + 1):
                break
            count += 1
        return count


@dataclass(frozen=True)
class SelectedColumns(ComputedTensor):
    """Columns of another matrix (`source`)."""

    columns: Sequence[int]
    """Their numbers in the other matrix, in rising order."""

    @property
    def shape(self) -> Shape:
        return (*self.source.shape[:-1], len(self.columns))

    def read_into(self, box: Box, out: Bytes) -> None:
        if not box.cols:
            return
        columns = np.asarray(self.columns[box.col0 : box.col1])
        first, last = int(columns[0]), int(columns[-1]) + 1
        step = max(1, _READ_BYTES // ((last - first) * ITEMSIZE[self.dtype]))
        for row in range(box.row0, box.row1, step):
            end = min(row + step, box.row1)
            band = Box(row, end, first, last)
            self._read_band(band, columns - first, out[row - box.row0 : end - box.row0])

    def _read_band(self, band: Box, places: Counts, out: Bytes) -> None:
        """Fill out with some columns of a rectangle of the other matrix, by their places in it."""
        itemsize = ITEMSIZE[self.dtype]
        elements = read_bytes(self.source, band, itemsize).view(f"V{itemsize}")
        out[:] = elements.take(places, axis=1).view(np.uint8)
