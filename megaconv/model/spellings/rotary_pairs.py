"""Meta's rotary order: the two halves of a head's rows as pairs of neighbours."""

from collections.abc import Iterator
from dataclasses import dataclass

from formats.lazy_numpy import np
from formats.tensor import Box, Bytes, LazyTensor
from megaconv.errors import NotExpressible
from megaconv.model.pieces import Pieces, Template
from megaconv.model.rank import Rank
from megaconv.model.regions import NativeOutput, NativeTensor, Order, Region
from megaconv.model.spellings.fused import Fused
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class AsPairs(Order):
    """Row i of a head's first half is followed by row i of its second half. A region starts at a head's first row."""

    head_dim: int
    """Number of rows of a head."""

    @property
    def together(self) -> int:
        return self.head_dim

    def read(self, region: Region, wanted: Box, native: LazyTensor, out: Bytes) -> None:
        for rows, box in self._pieces(region, wanted):
            halves = out[rows]
            if box.rows == 1:
                native.read_into(box, halves)
                continue
            pairs = np.empty(halves.shape, np.uint8)
            native.read_into(box, pairs)
            np.copyto(self._as_halves(halves), self._as_pairs(pairs))

    def write(self, region: Region, wanted: Box, native: NativeOutput, rows: Bytes) -> None:
        for part, box in self._pieces(region, wanted):
            halves = rows[part]
            if box.rows == 1:
                native.write(box, halves)
                continue
            pairs = native.scratch(box)
            np.copyto(self._as_pairs(pairs), self._as_halves(halves))
            native.write(box, pairs)

    def native_rows(self, region: Region, rows: range) -> list[int]:
        return [self._native_row(region, row - region.box.row0) for row in rows]

    def _native_row(self, region: Region, row: int) -> int:
        """row: counted from the region's first row."""
        head, inner = divmod(row, self.head_dim)
        half, index = divmod(inner, self.head_dim // 2)
        return region.row + head * self.head_dim + 2 * index + half

    def _as_halves(self, rows: Bytes) -> Bytes:
        """Whole heads in canonical order, as a view [heads, 2, half, row_bytes]."""
        return rows.reshape(-1, 2, self.head_dim // 2, rows.shape[1])

    def _as_pairs(self, rows: Bytes) -> Bytes:
        """Whole heads in native order, as a view with the same axes."""
        return rows.reshape(-1, self.head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2)

    def _pieces(self, region: Region, wanted: Box) -> Iterator[tuple[slice, Box]]:
        """Yield (rows of a block, their rectangle of the native tensor).

        Whole heads come in one piece, which is a permutation of as many native rows. Other rows come one by one.
        """
        first = region.box.row0
        start, stop = wanted.row0 - first, wanted.row1 - first
        whole_start = -(-start // self.head_dim) * self.head_dim
        whole_stop = stop // self.head_dim * self.head_dim
        if whole_start >= whole_stop:
            whole_start = whole_stop = stop
        heads = region.in_native(wanted)
        for row in range(start, whole_start):
            yield self._single(region, row, start, heads)
        if whole_start < whole_stop:
            rows = slice(whole_start - start, whole_stop - start)
            yield rows, heads._replace(row0=region.row + whole_start, row1=region.row + whole_stop)
        for row in range(whole_stop, stop):
            yield self._single(region, row, start, heads)

    def _single(self, region: Region, row: int, start: int, box: Box) -> tuple[slice, Box]:
        place = self._native_row(region, row)
        return slice(row - start, row - start + 1), box._replace(row0=place, row1=place + 1)


@dataclass(frozen=True)
class RotaryPairs(Separate):
    """Canonical tensors in Meta's rotary order: the two halves of a head's rows are stored as pairs, x0 y0 x1 y1 ..."""

    rotating: tuple[int, ...]
    """Numbers of the row's tensors that are stored in this order: q and k rotate, v doesn't."""

    def stored(self, native: NativeTensor, member: int, rank: Rank) -> NativeTensor:
        if member not in self.rotating:
            return native
        return native.in_order(AsPairs(rank.sizes["head_dim"]))


@dataclass(frozen=True)
class FusedPairs(Fused):
    """Canonical tensors joined along the rows, group by group, of which some are in Meta's rotary order."""

    rotating: tuple[int, ...] = ()
    """Numbers of the row's tensors that are stored in this order."""

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        order = AsPairs(pieces.rank.sizes["head_dim"])
        for template in super().natives(pieces):
            parts = dict(template.native.parts)
            for name in [list(parts)[member] for member in self.rotating]:
                parts[name] = tuple(region._replace(order=order) for region in parts[name])
            yield template._replace(native=template.native._replace(parts=parts))

    def _share(self, pieces: Pieces, groups: int) -> NativeTensor:
        raise NotExpressible(
            f"{self.name}: {pieces.rank.layout.tp} ranks can't share {groups} groups of rotary pairs"
        )
