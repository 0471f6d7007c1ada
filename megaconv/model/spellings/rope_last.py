"""The heads of an indexer with their rotating rows last, as in older releases of Megatron core."""

from collections.abc import Iterator
from dataclasses import dataclass

from formats.tensor import Box
from megaconv.model.rank import Rank
from megaconv.model.regions import PLAIN, NativeTensor, Region
from megaconv.model.spellings.rotary_pairs import AsPairs
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class RopeLast(Separate):
    """Rows of an indexer's heads. The rotating rows of each head come first in canonical tensors, and last in this
    naming scheme."""

    halves: bool
    """True if row i of the first rotating half and row i of the second half belong together. This naming scheme then
    stores them as pairs of neighbours."""

    def refusal(self, tp: int | None) -> str:
        return (
            "every rank has all of an indexer's heads, so that RopeLast can't have tp 0"
            if tp == 0
            else ""
        )

    def stored(self, native: NativeTensor, member: int, rank: Rank) -> NativeTensor:
        head = rank.whole["index_dim"]
        rope = rank.whole["rope_dim"]
        name, whole = native.only_region()
        regions = list[Region]()
        for first in range(0, whole.box.rows, head):
            regions += self._head(whole.box, first, first + rope, first + head)
        return native._replace(parts={name: tuple(regions)})

    def _head(self, box: Box, first: int, middle: int, end: int) -> Iterator[Region]:
        """Yield the regions of one head: its rotating rows first to middle, and the other rows up to end."""
        rope = middle - first
        rotating = box._replace(row0=first, row1=middle)
        yield Region(rotating, end - rope, order=AsPairs(rope) if self.halves else PLAIN)
        if middle < end:
            others = box._replace(row0=middle, row1=end)
            yield Region(others, first)
