"""Rows that alternate in the canonical tensor and are two halves in the native tensor, as GPT-OSS's gate and up."""

from collections.abc import Iterator
from dataclasses import dataclass

from formats.tensor import Box, Bytes, LazyTensor
from megaconv.model.rank import Rank
from megaconv.model.regions import NativeOutput, NativeTensor, Order, Region
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class AsHalves(Order):
    """The rows of a region alternate between the two halves of its native rows. The first row is in the first half."""

    @property
    def together(self) -> int:
        return 2

    def read(self, region: Region, wanted: Box, native: LazyTensor, out: Bytes) -> None:
        for every_second, box in self._pieces(region, wanted):
            native.read_into(box, out[every_second])

    def write(self, region: Region, wanted: Box, native: NativeOutput, rows: Bytes) -> None:
        for every_second, box in self._pieces(region, wanted):
            native.write(box, rows[every_second])

    def native_rows(self, region: Region, rows: range) -> list[int]:
        return [self._native_row(region, row - region.box.row0) for row in rows]

    def _native_row(self, region: Region, row: int) -> int:
        """row: counted from the region's first row."""
        index, half = divmod(row, 2)
        return region.row + half * region.box.rows // 2 + index

    def _pieces(self, region: Region, wanted: Box) -> Iterator[tuple[slice, Box]]:
        """Yield (every second row of a block, the rectangle of the native tensor), for each of the two halves."""
        start, stop = wanted.row0 - region.box.row0, wanted.row1 - region.box.row0
        box = region.in_native(wanted)
        for half in (0, 1):
            first = start + (half - start) % 2
            count = len(range(first, stop, 2))
            if count:
                row = self._native_row(region, first)
                yield (
                    slice(first - start, stop - start, 2),
                    box._replace(row0=row, row1=row + count),
                )


@dataclass(frozen=True)
class Halves(Separate):
    """A canonical tensor with alternating rows, g0 u0 g1 u1 ..., stored as two halves, [g; u]."""

    def stored(self, native: NativeTensor, member: int, rank: Rank) -> NativeTensor:
        return native.in_order(AsHalves())
