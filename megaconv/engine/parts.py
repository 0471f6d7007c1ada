"""Plans an output in parts: the order of the tensors, what else is in each file, and how much waits at most.

A store takes parts in any order, but only complete ones. The tensors are written in the order of the files, so that few
parts are incomplete at the same time. Everything is known from the plan, before the first byte.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from formats.output import FileLayout, Piece, pieces
from formats.partial_files import Span
from formats.stores.part_sizes import gaps
from formats.tensor import LazyTensor, matrix_shape
from megaconv.engine.in_step import units
from megaconv.engine.open_parts import Period, open_periods, spans
from megaconv.engine.plan import OutputPlan
from megaconv.engine.stream import Unit
from megaconv.model.ir import Key, Source, TensorInfo


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
    """The place of each tensor in the order of writing. Tensors that are moved in step have the same place."""
    files: Mapping[str, FileParts]
    """The files with tensors, by name."""
    periods: Sequence[Period]
    """The periods in which parts are incomplete."""
    ahead: int = 1
    """A place is begun only if less than this number of places come after the first unfinished one."""

    @property
    def largest_part(self) -> int:
        return max((period.nbytes for period in self.periods), default=0)


def in_parts(plan: OutputPlan, manifest: Mapping[Key, TensorInfo]) -> Iterator[PartPlan]:
    """Yield the plans of an output in parts, in each of the possible orders, with one place at a time."""
    zeros = _zeros(plan)
    files = {
        name: _file_parts(layout, zeros.get(name, ()))
        for name, layout in plan.files.items()
        if layout.records
    }
    headers = {name: of_file.pieces for name, of_file in files.items()}
    written = [key for key, places in plan.placements.items() if places]
    rows = {key: matrix_shape(manifest[key].shape)[0] for key in written}
    for order in orders(plan):
        yield PartPlan(order, files, open_periods(plan, order, rows, headers))


def in_order(source: Source, order: Mapping[Key, int]) -> Iterator[Unit]:
    """The tensors of a source in this order, those of one place together; those without a place last.

    Only tensors that are read later can be put in order. A plugin's arrays in memory come as they come.
    """
    waiting: list[tuple[int, int, Key, LazyTensor]] = []
    for number, (key, tensor) in enumerate(source.tensors()):
        if hasattr(tensor, "nbytes"):
            yield [(key, tensor)]
        else:
            waiting.append((order.get(key, len(order) + number), number, key, tensor))
    waiting.sort(key=lambda entry: entry[:2])
    for _, entries in groupby(waiting, key=lambda entry: entry[0]):
        yield [(key, tensor) for _, _, key, tensor in entries]


def orders(plan: OutputPlan) -> list[dict[Key, int]]:
    """The possible orders of writing: file after file, and files with shards of the same tensors side by side.

    Each is better for some outputs. Side by side, a few parts of each of these files are open. File after file, the parts of later
    files that hold an early tensor are open until the rest of them comes.
    """
    extents = _extents(plan)
    found = units(plan, extents)
    one_by_one = {name: number for number, name in enumerate(plan.files)}
    both = [_order(found, extents, ranks) for ranks in (one_by_one, _side_by_side(plan))]
    return both if both[0] != both[1] else both[:1]


def _extents(plan: OutputPlan) -> dict[tuple[str, Key], Span]:
    """The range from the first to the last byte of each tensor in each file."""
    filled: dict[tuple[str, Key], list[Span]] = {}
    for key, places in plan.placements.items():
        for place in places:
            of_file = filled.setdefault((place.file, key), [])
            of_file += spans(plan.files[place.file], place)
    return {where: _extent(ranges) for where, ranges in filled.items()}


def _extent(ranges: Sequence[Span]) -> Span:
    """A tensor without elements fills no byte. Its place is the beginning of the file."""
    if not ranges:
        return 0, 0
    return min(start for start, _ in ranges), max(end for _, end in ranges)


def _order(
    found: Sequence[Sequence[Key]],
    extents: Mapping[tuple[str, Key], Span],
    ranks: Mapping[str, int],
) -> dict[Key, int]:
    """The places of all tensors, by the first byte that the tensors of a place fill. ranks: the rank of each file."""
    first: dict[Key, tuple[int, int]] = {}
    for (file, key), (start, _) in extents.items():
        begin = ranks[file], start
        first[key] = min(first.get(key, begin), begin)
    in_order = sorted(found, key=lambda keys: min(first[key] for key in keys))
    return {key: number for number, keys in enumerate(in_order) for key in keys}


def _side_by_side(plan: OutputPlan) -> dict[str, int]:
    """A number of each file, which is the same for files that hold shards or copies of one tensor."""
    sets = {name: {name} for name in plan.files}
    for places in plan.placements.values():
        for place in places[1:]:
            joined, added = sets[places[0].file], sets[place.file]
            if joined is not added:
                joined |= added
                sets.update(dict.fromkeys(added, joined))
    numbers: dict[int, int] = {}
    return {name: numbers.setdefault(id(sets[name]), len(numbers)) for name in plan.files}


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
