"""Several canonical tensors joined along the rows: Megatron's fused q, k and v, or gate and up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megaconv.model.layout import divide
from megaconv.model.patterns import evaluate
from megaconv.model.pieces import Pieces, Template
from megaconv.model.rank import RANKS
from megaconv.model.regions import NativeTensor, Region
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class Fused(Separate):
    """Several canonical tensors in one native tensor, joined along the rows, group by group.

    With 2 groups, q, k and v are stored as q0 k0 v0 q1 k1 v1, where each piece's rows are divided in two halves. With 1
    group they are stored as q k v.
    """

    groups: str = "1"
    """Number of groups: 1, or a size of the model, such as `kv_heads`. A rank holds its share of that size."""

    joins: ClassVar[bool] = True

    def refusal(self, tp: int | None) -> str:
        if self.groups.isdigit() or tp == 0:
            return ""
        return f"a rank has its own share of {self.groups}, so that Fused by these needs tp 0"

    def natives(self, pieces: Pieces) -> Iterator[Template]:
        yield Template(self._fused(pieces), each_expert=pieces.of_experts)

    def _fused(self, pieces: Pieces) -> NativeTensor:
        """A rank's own whole groups. If there are more ranks than groups: the rank's share of the joined rows."""
        (groups,) = evaluate(self.groups, pieces.rank.whole)
        if self.groups == "1":
            return pieces.joined(self.name, pieces.shards())
        if pieces.tp == 0 and pieces.rank.layout.tp > groups:
            return self._share(pieces, groups)
        (own,) = evaluate(self.groups, pieces.rank.sizes)
        return pieces.joined(self.name, pieces.shards(), own)._replace(groups=groups)

    def _share(self, pieces: Pieces, groups: int) -> NativeTensor:
        whole = pieces.joined(self.name, pieces.whole(), groups)
        rows = divide(whole.shape[0], pieces.rank.layout.tp, f"rows of {self.name}", RANKS["tp"])
        return _rows_of(whole, pieces.rank.tp_rank * rows, rows)._replace(groups=groups)


def _rows_of(native: NativeTensor, first: int, rows: int) -> NativeTensor:
    """A range of rows of a joined tensor."""
    parts: dict[str, tuple[Region, ...]] = {}
    for name, regions in native.parts.items():
        kept = tuple(_clipped(regions, first, first + rows))
        if kept:
            parts[name] = kept
    return native._replace(parts=parts, shape=(rows, *native.shape[1:]))


def _clipped(regions: tuple[Region, ...], first: int, last: int) -> Iterator[Region]:
    """The regions inside the native rows first to last, which are counted from `first` on."""
    for region in regions:
        start, stop = max(first, region.row), min(last, region.row + region.box.rows)
        if start < stop:
            row0 = region.box.row0 + start - region.row
            box = region.box._replace(row0=row0, row1=row0 + stop - start)
            yield region._replace(box=box, row=start - first)
