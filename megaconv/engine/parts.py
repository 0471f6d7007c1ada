"""Plans an output in parts: the order of the tensors, what else is in each file, and how much waits at most.

A store takes parts in any order, but only complete ones. The tensors are written in the order of the files, so that few
parts are incomplete at the same time. Everything is known from the plan, before the first byte.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from formats.output import FileLayout, Piece, pieces
from formats.partial_files import Span
from formats.stores.part_sizes import gaps
from formats.tensor import LazyTensor
from megaconv.engine.open_parts import Period, open_periods, spans
from megaconv.engine.plan import OutputPlan
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
    periods: Sequence[Period]
    """The periods in which parts are incomplete."""
    ahead: int = 1
    """A tensor is begun only if less than this number of tensors come after the first unfinished one."""

    @property
    def largest_part(self) -> int:
        return max((period.nbytes for period in self.periods), default=0)


def in_parts(plan: OutputPlan) -> PartPlan:
    """The plan of an output in parts, with one tensor at a time."""
    order = {key: place for place, key in enumerate(_in_order(plan))}
    zeros = _zeros(plan)
    files = {
        name: _file_parts(layout, zeros.get(name, ()))
        for name, layout in plan.files.items()
        if layout.records
    }
    headers = {name: of_file.pieces for name, of_file in files.items()}
    return PartPlan(order, files, open_periods(plan, order, headers))


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
