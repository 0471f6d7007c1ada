"""Splits the tensors of a distributed checkpoint into chunks, as the ranks of a layout would read them.

A single rank's native tensor becomes a part of a global tensor. The global tensor has further axes for the layer and
the expert if these are stacked. The native tensor is split along its tensor-parallel axis, so that a rank reads only
what it needs. A fused [gate; up] has a chunk of either part for every rank. q, k, v is split into whole groups, or into
rows if there are more ranks than groups.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from formats.tensor import Box, Shape, matrix_shape
from megaconv.model.assembled import overlap
from megaconv.model.ir import WEIGHT
from megaconv.model.layout import divide
from megaconv.model.natives import NativeTensor, Region
from megaconv.model.rank import RANKS

Regions = tuple[Region, ...]


class PlannedChunk(NamedTuple):
    """A rectangle of a global tensor, and its canonical tensors."""

    key: str
    offset: Shape
    shape: Shape
    dtype: str
    cols: int
    """The number of columns for regions: the columns of the native tensor, 1 for a vector."""
    parts: Sequence[tuple[str, Regions]]
    """(canonical name, regions), with rows and columns counted in the chunk.

    A chunk with padding names the tensor that it pads, even if it holds no other part of this tensor.
    """
    slot: str = WEIGHT
    """The kind of tensor: the weight, or an optimizer slot."""
    padding: range = range(0)
    """The chunk's own rows that belong to no canonical tensor."""
    shift: int = 0
    """The native tensor's shift."""


def chunks_of(
    native: NativeTensor, key: str, place: Shape, dtype: str, ranks: int, slot: str = WEIGHT
) -> Iterator[PlannedChunk]:
    """The chunks of one native tensor, in row-major order.

    place: its position in the first axes of the global tensor `key`. Raises LayoutError if the ranks can't have
    equal shares.
    """
    _require_equal_shares(native, ranks)
    form = _Form(
        native.shape, native.tp, native.groups, native.padding_rows, tuple(native.parts.values())
    )
    names = list(native.parts)
    for offset, shape, cols, regions, padding in _rectangles(form, ranks, len(place)):
        held = [
            (name, found) for name, found in zip(names, regions, strict=True) if found or padding
        ]
        begin = place + offset
        yield PlannedChunk(key, begin, shape, dtype, cols, held, slot, padding, native.shift)


def _require_equal_shares(native: NativeTensor, ranks: int) -> None:
    over = RANKS["etp" if native.of_experts else "tp"]
    if native.tp == 1:
        _, cols = matrix_shape(native.shape)
        divide(cols, ranks, f"columns of {native.name}", over)
    elif native.tp == 0:
        for shared in _shared_rows(native, ranks):
            divide(shared, ranks, f"rows of {native.name}", over)


def _shared_rows(native: NativeTensor, ranks: int) -> Iterator[int]:
    """The numbers of rows of which every rank has an equal share: of the whole tensor, or of each fused part."""
    if _shares_whole(len(native.parts), native.groups, ranks):
        yield matrix_shape(native.shape)[0]
        return
    for regions in native.parts.values():
        yield sum(region.box.rows for region in regions)


def _shares_whole(parts: int, groups: int | None, ranks: int) -> bool:
    """True if a rank's share is a range of rows. Otherwise it is a share of each part."""
    return parts == 1 or (groups is not None and ranks > groups)


class _Form(NamedTuple):
    """The properties that decide how a native tensor is split.

    They are equal for all layers' and experts' tensors of a table row.
    """

    shape: Shape
    tp: int | None
    groups: int | None
    padding_rows: int
    parts: tuple[Regions, ...]


class _Rectangle(NamedTuple):
    """A chunk without names and without its place in a stack."""

    offset: Shape
    """The offset in the native tensor's own axes."""
    shape: Shape
    """The shape in all axes."""
    cols: int
    parts: tuple[Regions, ...]
    padding: range


@lru_cache(maxsize=4096)
def _rectangles(form: _Form, ranks: int, stacked: int) -> tuple[_Rectangle, ...]:
    """The chunks of one form, in row-major order. stacked: number of axes of the global tensor before the native ones.

    A mixture-of-experts model has tens of thousands of tensors in a few forms. The cached result serves all tensors of
    a form.
    """
    rows, cols = matrix_shape(form.shape)
    row_runs = _row_runs(form, ranks) if form.tp == 0 else [range(rows)]
    width = cols // ranks if form.tp == 1 else cols
    filled = rows - form.padding_rows
    found: list[_Rectangle] = []
    for run in row_runs:
        filled_in_run = min(max(0, filled - run.start), len(run))
        padding = range(filled_in_run, len(run))
        for col in range(0, cols, width):
            box = Box(run.start, run.stop, col, col + width)
            columns = range(col, col + width)
            offset, native = _axes(form.shape, run, columns)
            shape = (1,) * stacked + native
            parts = tuple(tuple(_inside(regions, box)) for regions in form.parts)
            found.append(_Rectangle(offset, shape, width, parts, padding))
    return tuple(found)


def _axes(whole: Shape, rows: range, cols: range) -> tuple[Shape, Shape]:
    """(offset, shape) of a rectangle in the axes of the tensor. Axes between the first and the last are whole."""
    if not whole:
        return (), ()
    if len(whole) == 1:
        return (rows.start,), (len(rows),)
    inner = whole[1:-1]
    return (
        (rows.start // prod(inner), *(0,) * len(inner), cols.start),
        (len(rows) // prod(inner), *inner, len(cols)),
    )


def _row_runs(form: _Form, ranks: int) -> list[range]:
    """Ranges of rows that belong to one rank. Every rank has an equal share of every part.

    If there are more ranks than groups, a share is a range of rows instead of whole groups.
    """
    rows, _ = matrix_shape(form.shape)
    if _shares_whole(len(form.parts), form.groups, ranks):
        step = rows // ranks
        return [range(start, start + step) for start in range(0, rows, step)]
    # First row of each stretch -> the rank that owns it. If q, k and v are interleaved by groups, a rank's rows are
    # consecutive, and neighbouring stretches of one rank become one range. [gate; up] gives every rank two ranges.
    owners: dict[int, int] = {}
    for regions in form.parts:
        step = sum(region.box.rows for region in regions) // ranks
        for region in regions:
            first, end = region.box.row0, region.box.row1
            shift = region.row - first
            for owner in range(first // step, -(-end // step)):
                stretch = max(owner * step, first)
                owners[stretch + shift] = owner
    starts = sorted(owners)
    bounds = [0]
    for before, start in pairwise(starts):
        if owners[before] != owners[start]:
            bounds.append(start)
    bounds.append(rows)
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _inside(regions: Regions, box: Box) -> Iterator[Region]:
    """The parts of these regions in a rectangle of the native tensor, counted from its first element."""
    for region in regions:
        there = Box(
            region.row, region.row + region.box.rows, region.col, region.col + region.box.cols
        )
        found = overlap(there, box)
        if found is not None:
            down, right = region.box.row0 - region.row, region.box.col0 - region.col
            canonical = Box(
                found.row0 + down, found.row1 + down, found.col0 + right, found.col1 + right
            )
            yield region._replace(
                box=canonical, row=found.row0 - box.row0, col=found.col0 - box.col0
            )
