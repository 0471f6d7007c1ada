"""The parts of an upload that are incomplete at the same time, known from the plan.

A part is open from its first byte to its last one. Most parts belong to one tensor, whose rows are written from the first
to the last: few of them are open at once, however large the tensor is. The same holds for tensors that are moved in step
(in_step.py). A part with bytes of several places in the order is open until the last of them is written.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import nextafter
from typing import NamedTuple

from formats.output import FileLayout, Piece
from formats.partial_files import Span
from formats.stores.part_sizes import part_bytes
from formats.tensor import Box
from megaconv.engine.in_step import share
from megaconv.engine.plan import BLOCK_BYTES, OutputPlan, Placement
from megaconv.model.ir import Key
from megaconv.model.regions import PLAIN, Region

_END = 2.0
"""A share behind every tensor: a header is written when its last tensor is complete."""


class Moment(NamedTuple):
    """A time during the work on a tensor, or on tensors that are moved in step."""

    place: int
    """The place in the order of writing."""
    share: float
    """The share of the tensor before the block that is being written."""


class Period(NamedTuple):
    """The time in which a part is open, or parts that follow one another."""

    nbytes: int
    """Size of the part."""
    first: Moment
    last: Moment
    """The last moment at which it may be incomplete."""


class Open(NamedTuple):
    """Parts that are open at the same time."""

    nbytes: int = 0
    """The sum of their sizes."""
    number: int = 0

    def plus(self, other: "Open") -> "Open":
        return Open(self.nbytes + other.nbytes, self.number + other.number)

    def negative(self) -> "Open":
        return Open(-self.nbytes, -self.number)

    def at_least(self, other: "Open") -> "Open":
        """The larger numbers of both."""
        return Open(max(self.nbytes, other.nbytes), max(self.number, other.number))


def spans(layout: FileLayout, place: Placement) -> Iterator[Span]:
    """The ranges of a file that a placement fills, each from the first to the last byte of its rows."""
    start = layout.records[place.record].offset + place.offset
    for region in place.regions:
        for box in region.order.filled(region):
            yield _bytes_of(box, place, start)


def _bytes_of(box: Box, place: Placement, start: int) -> Span:
    return start + box.row0 * place.row_bytes, start + box.row1 * place.row_bytes


def open_periods(
    plan: OutputPlan,
    order: Mapping[Key, int],
    rows: Mapping[Key, int],
    headers: Mapping[str, Sequence[Piece]],
) -> list[Period]:
    """The periods of all parts.

    order, rows: each tensor's place in the order of writing, and its number of rows. headers: what else is written, by file.
    """
    parts = _Parts(plan)
    ends: dict[tuple[str, str], int] = {}
    for key, places in plan.placements.items():
        for place in places:
            where = place.file, place.record
            ends[where] = max(ends.get(where, 0), order[key])
            parts.add_tensor(place, order[key], rows[key])
    for name, pieces in headers.items():
        for piece in pieces:
            moments = [ends[name, record] for record in piece.needs if (name, record) in ends]
            if moments:
                parts.add_header(name, piece, Moment(max(moments), _END))
    return parts.periods()


class _Writing(NamedTuple):
    """The writing of a region of a tensor into a file."""

    region: Region
    row_bytes: int
    """Bytes of one row of the native tensor."""
    number: int
    """The tensor's place in the order."""
    rows: int
    """All rows of the tensor."""
    start: int
    """The first byte of the native tensor in its file."""

    def moments(self, begin: int, end: int) -> tuple[Moment, Moment]:
        """The first and the last moment at which a range of the file is written."""
        row, after = self._rows(begin - self.start, end - self.start)
        # The block with this row begins before it, by less than the most rows of a block.
        row = max(0, row + 1 - max(1, BLOCK_BYTES // max(1, self.row_bytes)))
        first = Moment(self.number, share(row, self.rows))
        return first, Moment(self.number, share(after - 1, self.rows))

    def _rows(self, begin: int, end: int) -> tuple[int, int]:
        """The rows of the tensor that fill a range of the native tensor: [first, last + 1)."""
        row0, row1, _, _ = self.region.box
        if self.region.order is not PLAIN or not self.row_bytes:
            return row0, row1
        shift = row0 - self.region.row
        return (
            max(row0, begin // self.row_bytes + shift),
            min(row1, -(-end // self.row_bytes) + shift),
        )


class _Parts:
    """The parts of all files, and the moments of their first and last bytes."""

    def __init__(self, plan: OutputPlan) -> None:
        self._layouts = plan.files
        self._sizes = {name: layout.size for name, layout in plan.files.items()}
        self._steps = {name: part_bytes(size) for name, size in self._sizes.items()}
        self._found: dict[tuple[str, int], tuple[Moment, Moment]] = {}
        self._inner: list[Period] = []
        """The periods of parts that follow one another within a tensor."""

    def add_tensor(self, place: Placement, number: int, rows: int) -> None:
        """Add the parts that a placement of a tensor touches.

        number: the tensor's place in the order. rows: all of its rows.
        """
        start = self._layouts[place.file].records[place.record].offset + place.offset
        for region in place.regions:
            writing = _Writing(region, place.row_bytes, number, rows, start)
            for box in region.order.filled(region):
                self._add_span(place.file, writing, *_bytes_of(box, place, start))

    def _add_span(self, file: str, writing: _Writing, begin: int, end: int) -> None:
        """Add the parts that a range of a file touches."""
        step = self._steps[file]
        borders = range((begin // step + 1) * step, end, step)
        if len(borders) > 1 and writing.region.order is PLAIN:
            self._add_inner(writing, borders)
            self._add(file, begin // step, writing.moments(begin, borders[0]))
            begin, borders = borders[-1], borders[:0]
        for first, after in pairwise((begin, *borders, end)):
            self._add(file, first // step, writing.moments(first, after))

    def _add_inner(self, writing: _Writing, borders: range) -> None:
        """Add the parts between the first and the last one of a range, which is written from its start to its end.

        No two of them are open at once, nor one of them and the last part: a part is complete before the next one begins.
        """
        first, _ = writing.moments(borders[0], borders[1])
        last, _ = writing.moments(borders[-1], borders[-1] + 1)
        before = last._replace(share=nextafter(last.share, -1.0))
        if first <= before:
            self._inner.append(Period(borders.step, first, before))

    def add_header(self, file: str, piece: Piece, written: Moment) -> None:
        """Add the parts that a header touches, which is written at one moment."""
        step = self._steps[file]
        for part in range(piece.offset // step, (piece.offset + piece.nbytes - 1) // step + 1):
            self._add(file, part, (written, written))

    def _add(self, file: str, part: int, moments: tuple[Moment, Moment]) -> None:
        known = self._found.get((file, part))
        if known is not None:
            moments = min(known[0], moments[0]), max(known[1], moments[1])
        self._found[file, part] = moments

    def periods(self) -> list[Period]:
        found = list(self._inner)
        for (file, number), (first, last) in self._found.items():
            step = self._steps[file]
            found.append(Period(min(step, self._sizes[file] - number * step), first, last))
        return found


def most_open(periods: Sequence[Period], ahead: int) -> Open:
    """The most that is open at once, if at most `ahead` places in a row are being written, each at any of its rows."""
    if ahead == 1:  # all moments follow one another
        return _most_at_once(periods)
    changes: dict[int, Open] = {}
    inside: dict[int, list[Period]] = {}
    for period in periods:
        if period.first.place == period.last.place:
            inside.setdefault(period.first.place, []).append(period)
        else:
            _add(changes, period.first.place, period.last.place + ahead, Open(period.nbytes, 1))
    for place, alone in inside.items():
        _add(changes, place, place + ahead, _most_at_once(alone))
    return _highest(change for _, change in sorted(changes.items()))


def _add(changes: dict[int, Open], first: int, closed: int, amount: Open) -> None:
    """Add parts that are open from the time when `first` is the newest place that was begun, until `closed` is it."""
    changes[first] = changes.get(first, Open()).plus(amount)
    changes[closed] = changes.get(closed, Open()).plus(amount.negative())


def _most_at_once(periods: Iterable[Period]) -> Open:
    """The most that is open at one moment."""
    changes: list[tuple[Moment, bool, Open]] = []
    for period in periods:
        one = Open(period.nbytes, 1)
        changes += (period.first, False, one), (period.last, True, one.negative())
    # At a moment, parts are opened before others are closed.
    changes.sort(key=lambda change: change[:2])
    return _highest(amount for _, _, amount in changes)


def _highest(changes: Iterable[Open]) -> Open:
    """The highest sum of changes from the first to any of them."""
    now = most = Open()
    for change in changes:
        now = now.plus(change)
        most = most.at_least(now)
    return most
