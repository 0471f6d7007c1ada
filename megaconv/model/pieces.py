"""The canonical tensors that one spelling of a row stores, as a rank holds them.

Each canonical tensor is sharded for the rank first, and the shards are joined afterwards. Fused tensors therefore need
no separate tensor-parallel code.

The layers and experts of one row differ only in their names, so all names here keep the placeholders `{l}` and `{e}`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from formats.tensor import Box, Shape, matrix_shape
from megaconv.model.layout import divide
from megaconv.model.patterns import evaluate, of_layer, with_sizes
from megaconv.model.rank import RANKS, Rank
from megaconv.model.regions import NativeTensor, Region

_AFTER_OTHERS = re.compile(r"\{e\+(\d+)\}")
"""The number of an expert that is counted after others: `{e+64}`."""


class Shard(NamedTuple):
    """The part of a canonical tensor that a rank holds."""

    member: int
    """Number of the canonical tensor in its row."""
    name: str
    """Name pattern of the canonical tensor."""
    box: Box
    inner: Shape
    """Axes of the tensor between the first and the last. They count as rows and are never sharded."""


class Template(NamedTuple):
    """A native tensor on a rank. Its name and the names of its parts keep the placeholders `{l}` and `{e}`."""

    native: NativeTensor
    each_expert: bool = False
    """True if the rank has one such tensor for each of its experts. False if one tensor holds all experts, or none."""

    def of(self, local_layer: int, layer: int) -> NativeTensor:
        """The native tensor of one layer. The placeholder `{e}` stays in names."""
        parts = {of_layer(name, layer): regions for name, regions in self.native.parts.items()}
        name = of_layer(self.native.name, local_layer)
        # A large model has millions of such calls, and _replace takes twice the time.
        return NativeTensor(name, parts, *self.native[2:])


def of_expert(native: NativeTensor, local: str, expert: str) -> NativeTensor:
    """The native tensor of one expert.

    local: the expert's number on this rank. expert: its number in the model.
    """
    parts = {name.replace("{e}", expert): regions for name, regions in native.parts.items()}
    name = native.name.replace("{e}", local)
    if "{e+" in name:
        name = _AFTER_OTHERS.sub(lambda found: str(int(local) + int(found[1])), name)
    # As in Template.of.
    return NativeTensor(name, parts, *native[2:])


@dataclass(frozen=True)
class Pieces:
    """Canonical tensors that are stored by one spelling, and the rank that holds a shard of each."""

    row: str
    """The canonical name pattern of their row, for messages."""
    members: tuple[int, ...]
    """Their numbers in the row."""
    names: tuple[str, ...]
    shapes: tuple[str, ...]
    tp: int | None
    """The axis that tensor parallelism shards; None if every rank holds a copy."""
    of_experts: bool
    padded_vocab: bool
    rank: Rank

    def shards(self) -> list[Shard]:
        """The rank's own shards. Raises LayoutError if an axis can't be divided."""
        over, rank = ("etp", self.rank.etp_rank) if self.of_experts else ("tp", self.rank.tp_rank)
        count = self.rank.layout.sizes()[over]
        found = []
        for shard in self.whole():
            rows, cols = shard.box.rows, shard.box.cols
            row0 = col0 = 0
            if self.tp == 0:
                rows = divide(rows, count, f"rows of {self.row}", RANKS[over])
                row0 = rank * rows
            elif self.tp == 1:
                cols = divide(cols, count, f"columns of {self.row}", RANKS[over])
                col0 = rank * cols
            found.append(shard._replace(box=Box(row0, row0 + rows, col0, col0 + cols)))
        return found

    def whole(self) -> list[Shard]:
        """The whole tensors, as the only rank would hold them."""
        found = []
        for member, name, written in zip(self.members, self.names, self.shapes, strict=True):
            shape = evaluate(written, self.rank.whole)
            rows, cols = matrix_shape(shape)
            found.append(Shard(member, name, Box(0, rows, 0, cols), inner=shape[1:-1]))
        return found

    def of_each_expert(self, shards: Sequence[Shard]) -> list[list[str]]:
        """The names of these shards' tensors, for each of the rank's experts; in one list if they have no experts."""
        names = [shard.name for shard in shards]
        if not self.of_experts:
            return [names]
        return [
            [name.replace("{e}", str(expert)) for name in names] for expert in self.rank.experts
        ]

    def joined(self, name: str, shards: Sequence[Shard], groups: int = 1) -> NativeTensor:
        """The native tensor of shards that are joined along the rows, group by group.

        A group has an equal share of the rows of each shard: with 2 groups, three shards lie in the order
        [q0 k0 v0 q1 k1 v1].
        """
        rows = sum(shard.box.rows for shard in shards)
        parts: dict[str, tuple[Region, ...]] = {}
        before = padding = 0
        for shard in shards:
            padding = self._padding_rows(shard.box)
            rows_in_group = shard.box.rows // groups - padding
            parts[shard.name] = _spread(shard.box, rows_in_group, groups, before, rows // groups)
            before += rows_in_group
        return NativeTensor(
            with_sizes(name, self.rank.whole),
            parts,
            self._shape(rows, shards[0]),
            replicated=self.tp is None,
            tp=self.tp,
            of_experts=self.of_experts,
            padding_rows=padding,
        )

    def _padding_rows(self, box: Box) -> int:
        """Rows of a shard behind the end of the vocabulary. They are on the last ranks, which may hold nothing else."""
        if not self.padded_vocab:
            return 0
        # `vocab`, or the size of a shorter head.
        tokens = self.shapes[0].split()[0]
        rows_after_end = max(0, box.row1 - self.rank.sizes[tokens])
        return min(box.rows, rows_after_end)

    def _shape(self, rows: int, first: Shard) -> Shape:
        """The shape of `rows` joined rows of shards. first: the first of these shards."""
        axes = len(self.shapes[0].split())
        if not axes:
            return ()
        shape = (rows // prod(first.inner), *first.inner)
        return shape if axes == 1 else (*shape, first.box.cols)


def _spread(box: Box, step: int, groups: int, before: int, group_rows: int) -> tuple[Region, ...]:
    """The regions of one shard: `step` of its rows in each group of the native tensor, `before` rows after its start."""
    if not step:
        return ()
    starts = ((box.row0 + group * step, group * group_rows + before) for group in range(groups))
    return tuple(Region(box._replace(row0=row, row1=row + step), at) for row, at in starts)
