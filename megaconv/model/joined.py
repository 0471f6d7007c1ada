"""How a row's canonical tensors make up the native ones of a rank.

A rank's tensor is made by sharding each canonical piece for that rank first and joining the shards after, so that
fused tensors need no tensor-parallel code of their own: all that comes out are rectangles of canonical tensors and where
they lie in native ones. Evaluated in a rank's own sizes (heads / tp, ffn / tp ...) a shape is the rank's shape.

Layers and experts of one row differ in their names only: `{l}` and `{e}` are left in all names here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from formats.tensor import Box, Shape, matrix_shape
from megaconv.model.layout import Layout, divide
from megaconv.model.regions import NativeTensor, Region
from megaconv.model.sharding import RANKS
from megaconv.model.table import (
    Fused,
    Halves,
    OtherAxis,
    PerHead,
    RopeLast,
    RotaryPairs,
    Row,
    SecondHalfFirst,
    Separate,
    Shifted,
    Stacked,
    StackedTransposed,
    Transposed,
    evaluate,
    expand,
    of_layer,
)


@dataclass(frozen=True)
class Rank:
    """Whose tensors are asked for."""

    layout: Layout
    whole: Mapping[str, int]
    """Sizes of the whole model, its vocabulary padded."""
    sizes: Mapping[str, int]
    """This rank's own."""
    tp_rank: int
    ep_rank: int
    etp_rank: int

    @property
    def experts(self) -> range:
        """The global numbers of this rank's experts."""
        count = self.sizes["local_experts"]
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)


class _Shard(NamedTuple):
    """What a rank holds of a canonical tensor."""

    name: str
    """A pattern."""
    box: Box
    inner: Shape
    """Axes of the tensor between the first and the last; they count as rows, and are never sharded."""


class Template(NamedTuple):
    """A row's native tensor on a rank, with `{l}` and `{e}` left in its name and in those of its parts."""

    native: NativeTensor
    each_expert: bool = False
    """Whether there is one for every expert of the rank; otherwise it holds all of them, or the row is of none."""

    def of(self, local_layer: int, layer: int) -> NativeTensor:
        """That of one layer; `{e}` is left in names."""
        parts = {of_layer(name, layer): regions for name, regions in self.native.parts.items()}
        return NativeTensor(of_layer(self.native.name, local_layer), parts, *self.native[2:])


def of_expert(native: NativeTensor, local: str, expert: str) -> NativeTensor:
    """That of one expert, which the rank calls by its local number."""
    parts = {name.replace("{e}", expert): regions for name, regions in native.parts.items()}
    return NativeTensor(native.name.replace("{e}", local), parts, *native[2:])


def templates(row: Row, spelled: tuple[Separate, ...], rank: Rank) -> Iterator[Template]:
    """The native tensors of a row on a rank. spelled: all that it is in a naming scheme."""
    for spelling, members in row.shared_out(spelled):
        if isinstance(spelling, (Stacked, StackedTransposed, Transposed)):
            yield Template(_stacked(row, spelling, members, rank))
        elif isinstance(spelling, Fused):
            yield Template(_fused(row, spelling, members, rank), row.of_experts)
        else:
            shards = _shards(row, spelling, members, rank)
            for member, name, shard in zip(members, expand(spelling.name), shards, strict=True):
                native = _join(name, [shard], 1, row, spelling, rank)
                if isinstance(spelling, RotaryPairs) and member in spelling.rotating:
                    native = _rearranged(native, pairs=rank.sizes["head_dim"])
                native = _rearranged(native, halves=True) if isinstance(spelling, Halves) else native
                native = _rope_last(native, spelling, rank) if isinstance(spelling, RopeLast) else native
                native = _per_head(native, spelling, rank) if isinstance(spelling, PerHead) else native
                native = _second_half_first(native) if isinstance(spelling, SecondHalfFirst) else native
                native = native._replace(shift=spelling.by) if isinstance(spelling, Shifted) else native
                yield Template(native, row.of_experts)


def _shards(
    row: Row, spelling: Separate, members: tuple[int, ...], rank: Rank, *, sharded: bool = True
) -> list[_Shard]:
    """What the rank holds of these tensors of a row; all of them if not sharded."""
    axis = _axis(row, spelling) if sharded else None
    over, index = ("etp", rank.etp_rank) if row.of_experts else ("tp", rank.tp_rank)
    count = rank.layout.sizes()[over]
    names, shards = expand(row.canonical), []
    for member in members:
        shape = evaluate(row.shapes[member], rank.whole)
        rows, cols = matrix_shape(shape)
        if axis == 0:
            rows = divide(rows, count, f"rows of {row.canonical}", RANKS[over])
        elif axis == 1:
            cols = divide(cols, count, f"columns of {row.canonical}", RANKS[over])
        row0, col0 = index * rows if axis == 0 else 0, index * cols if axis == 1 else 0
        shards.append(_Shard(names[member], Box(row0, row0 + rows, col0, col0 + cols), shape[1:-1]))
    return shards


def _axis(row: Row, spelling: Separate) -> int | None:
    """What tensor parallelism shards in this naming scheme."""
    return spelling.tp if isinstance(spelling, OtherAxis) else row.tp


def _rearranged(native: NativeTensor, *, pairs: int = 0, halves: bool = False) -> NativeTensor:
    """The same rows in another order: each head's two halves as pairs of rows, or pairs of rows as two halves."""
    parts = {
        name: tuple(region._replace(pairs=pairs, halves=halves) for region in regions)
        for name, regions in native.parts.items()
    }
    return native._replace(parts=parts)


def _per_head(native: NativeTensor, spelling: PerHead, rank: Rank) -> NativeTensor:
    """The same rows with an axis for the heads; or each head's columns as rows, one head's after the other's."""
    heads, (rows, cols) = rank.sizes["heads"], matrix_shape(native.shape)
    step = rows // heads
    if not spelling.transposed:
        return native._replace(shape=(heads, step, cols))
    ((name, (whole,)),) = native.parts.items()
    starts = ((whole.box.row0 + head * step, head * cols) for head in range(heads))
    regions = (Region(whole.box._replace(row0=row0, row1=row0 + step), row, transposed=True) for row0, row in starts)
    return native._replace(parts={name: tuple(regions)}, shape=(heads, cols, step))


def _second_half_first(native: NativeTensor) -> NativeTensor:
    """The same columns, those of the second half before those of the first."""
    ((name, (whole,)),) = native.parts.items()
    box, half = whole.box, whole.box.cols // 2
    first, second = box._replace(col1=box.col0 + half), box._replace(col0=box.col0 + half)
    return native._replace(parts={name: (Region(first, whole.row, half), Region(second, whole.row, 0))})


def _rope_last(native: NativeTensor, spelling: RopeLast, rank: Rank) -> NativeTensor:
    """Each head's first rows, which rotate, behind its others. Every rank holds all heads."""
    head, rope = rank.whole["index_dim"], rank.whole["rope_dim"]
    ((name, (whole,)),) = native.parts.items()
    regions = list[Region]()
    for first in range(0, whole.box.rows, head):
        turning = Region(whole.box._replace(row0=first, row1=first + rope), first + head - rope)
        still = Region(whole.box._replace(row0=first + rope, row1=first + head), first)
        regions += [turning._replace(pairs=rope if spelling.halves else 0), *([still] if still.box.rows else [])]
    return native._replace(parts={name: tuple(regions)})


def _fused(row: Row, spelling: Fused, members: tuple[int, ...], rank: Rank) -> NativeTensor:
    """Whole groups of a rank's own; or, with more ranks than groups, its share of the rows of the whole tensor."""
    (groups,) = evaluate(spelling.groups, rank.whole)
    if spelling.groups != "1" and row.tp == 0 and rank.layout.tp > groups:
        whole = _join(spelling.name, _shards(row, spelling, members, rank, sharded=False), groups, row, spelling, rank)
        rows = divide(whole.shape[0], rank.layout.tp, f"rows of {spelling.name}", RANKS["tp"])
        return _rows_of(whole, rank.tp_rank * rows, rows)._replace(groups=groups)
    (own,) = evaluate(spelling.groups, rank.sizes)
    native = _join(spelling.name, _shards(row, spelling, members, rank), own, row, spelling, rank)
    return native._replace(groups=None if spelling.groups == "1" else groups)


def _join(name: str, shards: list[_Shard], groups: int, row: Row, spelling: Separate, rank: Rank) -> NativeTensor:
    """Join shards along the rows, group by group."""
    parts: dict[str, tuple[Region, ...]] = {}
    group_rows = sum(shard.box.rows for shard in shards) // groups
    before = padding = 0
    # A group has `step` rows of every shard, one shard's after the other's: [q0 k0 v0 q1 k1 v1 ...] of three shards.
    for piece, box, _ in shards:
        step = box.rows // groups
        if row.padded_vocab:
            # Rows beyond the vocabulary: on the last ranks, and there perhaps all of them.
            padding = min(box.rows, max(0, box.row1 - rank.sizes["vocab"]))
            step -= padding
        starts = ((box.row0 + group * step, group * group_rows + before) for group in range(groups))
        parts[piece] = tuple(Region(Box(first, first + step, box.col0, box.col1), at) for first, at in starts if step)
        before += step
    inner, axis = shards[0].inner, _axis(row, spelling)
    is_vector = " " not in row.shapes[0]
    rows = sum(shard.box.rows for shard in shards) // prod(inner)
    shape = (rows, *inner, *(() if is_vector else (shards[0].box.cols,))) if row.shapes[0] else ()
    return NativeTensor(name, parts, shape, axis is None, axis, of_experts=row.of_experts, padding_rows=padding)


def _rows_of(native: NativeTensor, first: int, rows: int) -> NativeTensor:
    """A run of rows of a joined tensor."""
    parts: dict[str, tuple[Region, ...]] = {}
    for name, regions in native.parts.items():
        kept = []
        for region in regions:
            start, stop = max(first, region.row), min(first + rows, region.row + region.box.rows)
            if start < stop:
                row0 = region.box.row0 + start - region.row
                box = region.box._replace(row0=row0, row1=row0 + stop - start)
                kept.append(region._replace(box=box, row=start - first))
        if kept:
            parts[name] = tuple(kept)
    return native._replace(parts=parts, shape=(rows, *native.shape[1:]))


def _stacked(row: Row, spelling: Separate, members: tuple[int, ...], rank: Rank) -> NativeTensor:
    """All of a rank's experts (or the row's only tensors) in one, the pieces of each beside or under each other."""
    shards = _shards(row, spelling, members, rank)
    experts = [str(expert) for expert in rank.experts] if row.of_experts else [""]
    pieces = [[shard.name.replace("{e}", expert) for shard in shards] for expert in experts]
    boxes = [shard.box for shard in shards]
    if isinstance(spelling, Stacked):
        return _row_wise(spelling.name, pieces, boxes)
    shape = evaluate(spelling.shape, rank.sizes) if isinstance(spelling, StackedTransposed) else None
    return _column_wise(spelling.name, shape, pieces, boxes, row)


def _column_wise(name: str, shape: Shape | None, pieces: list[list[str]], boxes: list[Box], row: Row) -> NativeTensor:
    """One block of rows [in] per expert (or the only one), its pieces as columns [out]; shape None: as it is."""
    parts: dict[str, tuple[Region, ...]] = {}
    for local_expert, names in enumerate(pieces):
        col = 0
        for piece, box in zip(names, boxes, strict=True):
            parts[piece] = (Region(box, local_expert * box.cols, col, transposed=True),)
            col += box.rows
    view = (len(pieces) * boxes[0].cols, sum(box.rows for box in boxes))
    return NativeTensor(name, parts, shape or view, of_experts=row.of_experts, view=view)


def _row_wise(name: str, pieces: list[list[str]], boxes: list[Box]) -> NativeTensor:
    """[experts, out, in]: one expert under the other, the pieces of each one under the other."""
    parts: dict[str, tuple[Region, ...]] = {}
    row = 0
    for names in pieces:
        for piece, box in zip(names, boxes, strict=True):
            parts[piece] = (Region(box, row),)
            row += box.rows
    return NativeTensor(name, parts, (len(pieces), row // len(pieces), boxes[0].cols), of_experts=True)
