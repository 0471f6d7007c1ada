"""Heads as two halves, as DiffLlama's: a pair of key/value heads is head i of the first half and head i of the second."""

from collections.abc import Iterator
from dataclasses import dataclass

from formats.tensor import Box
from megaconv.model.rank import Rank
from megaconv.model.regions import NativeTensor, Region
from megaconv.model.spellings.separate import Separate


@dataclass(frozen=True)
class HeadPairs(Separate):
    """Canonical tensors with the two key/value heads of each pair side by side, stored as all first heads, then all second.

    The rows of q that belong to a key/value head move with it. So a tensor-parallel rank has whole pairs.
    """

    def stored(self, native: NativeTensor, member: int, rank: Rank) -> NativeTensor:
        name, whole = native.only_region()
        regions = tuple(_heads_apart(whole.box, rank.sizes["kv_heads"]))
        return native._replace(parts={name: regions})


def _heads_apart(box: Box, kv_heads: int) -> Iterator[Region]:
    """Yield the region of each key/value head. kv_heads: the number of heads, whose rows the box has."""
    step = box.rows // kv_heads
    first_heads = (kv_heads + 1) // 2
    for number in range(kv_heads):
        pair, half = divmod(number, 2)
        place = half * first_heads + pair
        row0 = box.row0 + number * step
        yield Region(box._replace(row0=row0, row1=row0 + step), place * step)
