"""Splits the tensors of a distributed checkpoint into chunks, as the ranks of a layout would read them.

A native tensor as a single rank holds it becomes part of a global one: of its layer and its expert, where these are
stacked. It is split along the axis that tensor parallelism shards, so that a rank reads no more than it needs: a fused [gate;
up] into a piece of either for every rank, q, k, v into runs of whole groups, or of rows where there are more ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from formats.tensor import Box, Shape, matrix_shape
from megaconv.engine.assembled import overlap
from megaconv.model.ir import WEIGHT
from megaconv.model.natives import NativeTensor, Region


@dataclass(frozen=True)
class PlannedChunk:
    """A rectangle of a global tensor, and what of canonical tensors it is made of."""

    key: str
    offset: Shape
    shape: Shape
    dtype: str
    cols: int
    """That regions count in: those of the native tensor, 1 for a vector."""
    parts: Mapping[str, tuple[Region, ...]]
    """By canonical name; rows and columns count in the chunk. A chunk with padding names the tensor that it pads, even if it
    holds nothing else of it."""
    slot: str = WEIGHT
    """What it is of its parameters: the weight, or optimizer state."""
    padding: range = range(0)
    """The chunk's own rows that belong to no canonical tensor."""
    shift: int = 0
    """As the native tensor's."""


def chunks_of(
    native: NativeTensor, key: str, place: Shape, dtype: str, ranks: int, slot: str = WEIGHT
) -> Iterator[PlannedChunk]:
    """The chunks of one native tensor, in row-major order. place: in the first axes of the global tensor that key names."""
    rows, cols = matrix_shape(native.shape)
    row_runs = _row_runs(native, ranks) if native.tp == 0 else [range(rows)]
    width = cols // ranks if native.tp == 1 else cols
    filled = rows - native.padding_rows
    for run in row_runs:
        for col in range(0, cols, width):
            box = Box(run.start, run.stop, col, col + width)
            offset, shape = _axes(native.shape, run, range(col, col + width))
            parts = {name: tuple(_inside(regions, box)) for name, regions in native.parts.items()}
            padding = range(min(max(0, filled - run.start), len(run)), len(run))
            yield PlannedChunk(
                key, (*place, *offset), (*(1,) * len(place), *shape), dtype, width,
                {name: regions for name, regions in parts.items() if regions or padding}, slot, padding,
                native.shift,
            )  # fmt: skip


def _axes(whole: Shape, rows: range, cols: range) -> tuple[Shape, Shape]:
    """(offset, shape) of a rectangle in the axes of the tensor, those between the first and the last whole."""
    if not whole:
        return (), ()
    if len(whole) == 1:
        return (rows.start,), (len(rows),)
    inner = whole[1:-1]
    return (
        (rows.start // prod(inner), *(0,) * len(inner), cols.start),
        (len(rows) // prod(inner), *inner, len(cols)),
    )


def _row_runs(native: NativeTensor, ranks: int) -> list[range]:
    """Runs of rows that belong to one rank, which has an equal share of every part: of the rows, where it can't have whole groups."""
    rows, _ = matrix_shape(native.shape)
    if len(native.parts) == 1 or (native.groups is not None and ranks > native.groups):
        step = rows // ranks
        return [range(start, start + step) for start in range(0, rows, step)]
    # First row of each stretch of one rank -> that rank. Joined by groups, a rank's rows of q, k and v follow each other, and
    # neighbouring stretches of one rank become one run; [gate; up] gives every rank two.
    owners: dict[int, int] = {}
    for regions in native.parts.values():
        step = sum(region.box.rows for region in regions) // ranks
        for region in regions:
            for owner in range(region.box.row0 // step, -(-region.box.row1 // step)):
                first = max(owner * step, region.box.row0)
                owners[region.row + first - region.box.row0] = owner
    starts = sorted(owners)
    kept = [0, *(start for before, start in pairwise(starts) if owners[before] != owners[start])]
    return [range(start, stop) for start, stop in pairwise([*kept, rows])]


def _inside(regions: tuple[Region, ...], box: Box) -> Iterator[Region]:
    """What of these regions lies in a rectangle of the native tensor, counted from its first element."""
    for region in regions:
        there = Box(region.row, region.row + region.box.rows, region.col, region.col + region.box.cols)
        found = overlap(there, box)
        if found is not None:
            down, right = region.box.row0 - region.row, region.box.col0 - region.col
            canonical = Box(found.row0 + down, found.row1 + down, found.col0 + right, found.col1 + right)
            yield region._replace(box=canonical, row=found.row0 - box.row0, col=found.col0 - box.col0)
