"""The parts of an upload that are incomplete at the same time, known from the plan.

A part is open from its first byte to its last one. Most parts belong to one tensor, whose rows are written from the first
to the last: few of them are open at once, however large the tensor is. A part with bytes of several tensors is open until
the last of these tensors is written.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from formats.output import FileLayout, Piece
from formats.partial_files import Span
from formats.stores.part_sizes import part_bytes
from formats.tensor import Box
from megaconv.engine.plan import BLOCK_BYTES, OutputPlan, Placement
from megaconv.model.ir import Key
from megaconv.model.regions import PLAIN, Region

_END = 1 << 62
"""A block behind every tensor: a header is written when its last tensor is complete."""


class Moment(NamedTuple):
    """A time during the work on a tensor."""

    tensor: int
    """The tensor's place in the order of writing."""
    block: int
    """Number of the block of rows that is being written."""


class Period(NamedTuple):
    """The time in which a part is open."""

    nbytes: int
    """Size of the part."""
    first: Moment
    last: Moment
    """The moment after which it is complete."""


@dataclass(frozen=True)
class Open:
    """Parts that are open at the same time."""

    nbytes: int = 0
    """The sum of their sizes."""
    count: int = 0

    def __add__(self, other: "Open") -> "Open":
        return Open(self.nbytes + other.nbytes, self.count + other.count)

    def __sub__(self, other: "Open") -> "Open":
        return Open(self.nbytes - other.nbytes, self.count - other.count)

    def at_least(self, other: "Open") -> "Open":
        """The larger numbers of both."""
        return Open(max(self.nbytes, other.nbytes), max(self.count, other.count))


def spans(layout: FileLayout, place: Placement) -> Iterator[Span]:
    """The ranges of a file that a placement fills, each from the first to the last byte of its rows."""
    start = layout.records[place.record].offset + place.offset
    for region in place.regions:
        for box in region.order.filled(region):
            yield _bytes_of(box, place, start)


def _bytes_of(box: Box, place: Placement, start: int) -> Span:
    return start + box.row0 * place.row_bytes, start + box.row1 * place.row_bytes


def open_periods(
    plan: OutputPlan, order: Mapping[Key, int], headers: Mapping[str, Sequence[Piece]]
) -> list[Period]:
    """The periods of all parts. headers: what else is written, by file."""
    parts = _Parts(plan)
    ends: dict[tuple[str, str], int] = {}
    for key, places in plan.placements.items():
        for place in places:
            where = place.file, place.record
            ends[where] = max(ends.get(where, 0), order[key])
            parts.add_tensor(place, order[key])
    for name, pieces in headers.items():
        for piece in pieces:
            moments = [ends[name, record] for record in piece.needs if (name, record) in ends]
            if moments:
                written = Moment(max(moments), _END)
                parts.add(name, (piece.offset, piece.offset + piece.nbytes), written, written)
    return parts.periods()


class _Parts:
    """The parts of all files, and the moments of their first and last bytes."""

    def __init__(self, plan: OutputPlan) -> None:
        self._sizes = {name: layout.size for name, layout in plan.files.items()}
        self._layouts = plan.files
        self._found: dict[tuple[str, int], tuple[Moment, Moment]] = {}

    def add_tensor(self, place: Placement, tensor: int) -> None:
        """Add the parts that a placement of a tensor touches."""
        start = self._layouts[place.file].records[place.record].offset + place.offset
        for region in place.regions:
            for box in region.order.filled(region):
                self._add_region(region, place, tensor, start, _bytes_of(box, place, start))

    def _add_region(
        self, region: Region, place: Placement, tensor: int, start: int, span: Span
    ) -> None:
        """Add the parts of one range of a region. start: the first byte of the native tensor in its file."""
        # A block writes its rows at once: neighbours within a block are open together.
        block_rows = max(1, BLOCK_BYTES // max(1, place.row_bytes))
        for piece in _cut(span, part_bytes(self._sizes[place.file])):
            row, end = _rows(region, place, (piece[0] - start, piece[1] - start))
            first = Moment(tensor, row // block_rows)
            last = Moment(tensor, (end - 1) // block_rows + 1)
            self.add(place.file, piece, first, last)

    def add(self, file: str, span: Span, first: Moment, last: Moment) -> None:
        """Note that a range of a file is written from one moment to another."""
        step = part_bytes(self._sizes[file])
        for number in range(span[0] // step, max(span[0], span[1] - 1) // step + 1):
            known = self._found.get((file, number), (first, last))
            self._found[file, number] = min(known[0], first), max(known[1], last)

    def periods(self) -> list[Period]:
        found: list[Period] = []
        for (file, number), (first, last) in self._found.items():
            step = part_bytes(self._sizes[file])
            found.append(Period(min(step, self._sizes[file] - number * step), first, last))
        return found


def _cut(span: Span, step: int) -> Iterator[Span]:
    """The pieces of a range in the parts of a file."""
    begin, end = span
    inner = range((begin // step + 1) * step, end, step)
    yield from pairwise([begin, *inner, end])


def _rows(region: Region, place: Placement, span: Span) -> Span:
    """The rows of the tensor that fill a range of a native tensor: [first, last + 1)."""
    row0, row1 = region.box.row0, region.box.row1
    if region.order is not PLAIN or not place.row_bytes:
        return row0, row1
    shift = row0 - region.row
    begin, end = span
    first, last = begin // place.row_bytes, -(-end // place.row_bytes)
    return max(row0, first + shift), min(row1, last + shift)


def most_open(periods: Iterable[Period], ahead: int) -> Open:
    """The most that is open at once, if at most `ahead` tensors in a row are being written, each at any of its rows."""
    shared: dict[int, Open] = {}
    inside: dict[int, list[Period]] = {}
    for period in periods:
        if period.first.tensor == period.last.tensor:
            inside.setdefault(period.first.tensor, []).append(period)
            continue
        one = Open(period.nbytes, 1)
        # While the tensor with this number is the newest one that was begun.
        closed = period.last.tensor + ahead
        shared[period.first.tensor] = shared.get(period.first.tensor, Open()) + one
        shared[closed] = shared.get(closed, Open()) - one
    alone = {tensor: _most_at_once(found) for tensor, found in inside.items()}
    return _most_of_all(shared, alone, ahead)


def _most_at_once(periods: Sequence[Period]) -> Open:
    """The most that is open at once within one tensor."""
    changes: dict[int, Open] = {}
    for period in periods:
        one = Open(period.nbytes, 1)
        changes[period.first.block] = changes.get(period.first.block, Open()) + one
        changes[period.last.block + 1] = changes.get(period.last.block + 1, Open()) - one
    return _highest(changes)


def _most_of_all(changes: Mapping[int, Open], alone: Mapping[int, Open], ahead: int) -> Open:
    """The highest sum of the parts of several tensors and of those of single ones, `ahead` tensors in a row."""
    merged = dict(changes)
    for tensor, most in alone.items():
        merged[tensor] = merged.get(tensor, Open()) + most
        merged[tensor + ahead] = merged.get(tensor + ahead, Open()) - most
    return _highest(merged)


def _highest(changes: Mapping[int, Open]) -> Open:
    """The highest sum of changes from the first to any of them."""
    now = most = Open()
    for moment in sorted(changes):
        now = now + changes[moment]
        most = most.at_least(now)
    return most
