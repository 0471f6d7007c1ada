"""Plans an output in parts: the order of the tensors, what else is in each file, and how much waits at most.

A store takes parts in any order, but only complete ones. The tensors are written in the order of the files, so that few
parts are incomplete at the same time. Everything is known from the plan, before the first byte.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from formats.output import FileLayout, Piece, pieces
from formats.partial_files import Span
from formats.stores.part_sizes import gaps, part_bytes
from formats.tensor import LazyTensor
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.model.ir import Key, Source


@dataclass(frozen=True)
class FileParts:
    """The parts of a file in a store that are no tensors."""

    pieces: Sequence[Piece]
    """Headers, in the order of their offsets."""
    gaps: Sequence[Span]
    """Ranges that nobody writes."""


@dataclass(frozen=True)
class PartPlan:
    """An output in parts."""

    order: Mapping[Key, int]
    """The place of each tensor in the order of writing."""
    files: Mapping[str, FileParts]
    """The files with tensors, by name."""
    open_bytes: int = 0
    """The largest sum of the parts that are incomplete at the same time."""
    open_parts: int = 0
    largest_part: int = field(default=0)


def in_parts(plan: OutputPlan, ahead: int) -> PartPlan:
    """The plan of an output in parts.

    ahead: a tensor is begun only if less than this number of tensors after the first unfinished one.
    """
    order = {key: place for place, key in enumerate(_in_order(plan))}
    zeros = _zeros(plan)
    files = {
        name: _file_parts(layout, zeros.get(name, ()))
        for name, layout in plan.files.items()
        if layout.records
    }
    touched = _touched(plan, order, files)
    changes: dict[int, list[int]] = {}
    largest = 0
    for size, (first, last) in touched:
        largest = max(largest, size)
        changes.setdefault(first, []).append(size)
        changes.setdefault(last + ahead, []).append(-size)
    nbytes = count = most_bytes = most_count = 0
    for moment in sorted(changes):
        nbytes += sum(changes[moment])
        count += sum(1 if size > 0 else -1 for size in changes[moment])
        most_bytes, most_count = max(most_bytes, nbytes), max(most_count, count)
    return PartPlan(order, files, most_bytes, most_count, largest)


def in_order(source: Source, order: Mapping[Key, int]) -> Iterator[tuple[Key, LazyTensor]]:
    """The tensors of a source in this order; those without a place last.

    Only tensors that are read later can be put in order. A plugin's arrays in memory come as they come.
    """
    waiting: list[tuple[int, int, Key, LazyTensor]] = []
    for number, (key, tensor) in enumerate(source.tensors()):
        if hasattr(tensor, "nbytes"):
            yield key, tensor
        else:
            waiting.append((order.get(key, len(order)), number, key, tensor))
    for _, _, key, tensor in sorted(waiting, key=lambda entry: entry[:2]):
        yield key, tensor


def spans(layout: FileLayout, place: Placement) -> Iterator[Span]:
    """The ranges of a file that a placement fills, each from the first to the last byte of its rows."""
    start = layout.records[place.record].offset + place.offset
    for region in place.regions:
        for box in region.order.filled(region):
            yield start + box.row0 * place.row_bytes, start + box.row1 * place.row_bytes


def _in_order(plan: OutputPlan) -> list[Key]:
    """All tensors with a place, by the first byte that they fill."""
    numbers = {name: number for number, name in enumerate(plan.files)}

    def first(key: Key) -> tuple[int, int]:
        return min(
            (numbers[place.file], start)
            for place in plan.placements[key]
            for start, _ in spans(plan.files[place.file], place)
        )

    return sorted((key for key, places in plan.placements.items() if places), key=first)


def _zeros(plan: OutputPlan) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for file, record, offset, nbytes in plan.zeros:
        start = plan.files[file].records[record].offset + offset
        found.setdefault(file, []).append((start, start + nbytes))
    return found


def _file_parts(layout: FileLayout, zeros: Iterable[Span]) -> FileParts:
    empty = {name: 0 for name, record in layout.records.items() if not record.nbytes}
    headers = [_without_empty(piece, empty) for piece in pieces(layout)]
    headers.sort(key=lambda piece: piece.offset)
    written = [(piece.offset, piece.offset + piece.nbytes) for piece in headers]
    written += [
        (record.offset, record.offset + record.nbytes) for record in layout.records.values()
    ]
    unwritten = gaps(layout.size, written)
    return FileParts(headers, sorted([*unwritten, *zeros]))


def _without_empty(piece: Piece, empty: Mapping[str, int]) -> Piece:
    """The piece without a need of records that have no bytes: their CRC-32 is 0, and nobody writes them."""
    needs = tuple(record for record in piece.needs if record not in empty)
    if len(needs) == len(piece.needs):
        return piece
    return piece._replace(needs=needs, content=partial(_content, piece, empty))


def _content(piece: Piece, empty: Mapping[str, int], checksums: Mapping[str, int]) -> bytes:
    return piece.content({**checksums, **empty})


def _touched(
    plan: OutputPlan, order: Mapping[Key, int], files: Mapping[str, FileParts]
) -> list[tuple[int, Span]]:
    """(size, (first, last) tensor) of every part that a tensor touches."""
    found: dict[tuple[str, int], Span] = {}
    ends: dict[tuple[str, str], Span] = {}

    def touch(file: str, span: Span, moments: Span) -> None:
        step = part_bytes(plan.files[file].size)
        for number in range(span[0] // step, max(span[0], span[1] - 1) // step + 1):
            known = found.get((file, number), moments)
            found[file, number] = min(known[0], moments[0]), max(known[1], moments[1])

    for key, places in plan.placements.items():
        for place in places:
            moment = order[key]
            known = ends.get((place.file, place.record), (moment, moment))
            ends[place.file, place.record] = min(known[0], moment), max(known[1], moment)
            for span in spans(plan.files[place.file], place):
                touch(place.file, span, (moment, moment))
    for name, parts in files.items():
        for piece in parts.pieces:
            # A header is written when its last record is complete, and its part waits for it.
            moments = [ends[name, record][1] for record in piece.needs if (name, record) in ends]
            if moments:
                span = piece.offset, piece.offset + piece.nbytes
                touch(name, span, (max(moments), max(moments)))
    return [
        (_part_size(plan.files[file].size, number), moments)
        for (file, number), moments in found.items()
    ]


def _part_size(size: int, number: int) -> int:
    step = part_bytes(size)
    return min(step, size - number * step)
