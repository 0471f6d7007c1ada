"""Proves before the first byte is written that a plan writes every element of every tensor, from its rectangles alone.

The proof has three parts:

1. Every element of every tensor is in the output.
2. No tensor of the output holds an element twice, except for the rows that pad a vocabulary.
3. Every byte of every record is written exactly once: as part of a tensor, or as zero.

A large plan has a million placements, but only a few dozen kinds of them. Each kind is checked once.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from formats.output import FileLayout
from formats.tensor import ITEMSIZE, Box, Shape, matrix_shape
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.errors import CheckpointError
from megaconv.model.ir import Key, TensorInfo
from megaconv.model.regions import Region

REPORT = "please report this"


def require_complete(plan: OutputPlan, manifest: Mapping[Key, TensorInfo]) -> None:
    """Raises CheckpointError, which names the tensor or record, for a plan that violates one of the conditions."""
    kinds = _Kinds()
    tensors, records = _Tensors(kinds), _Records(plan, kinds)
    for key, info in manifest.items():
        placements = plan.placements.get(key, ())
        if not placements:
            raise _fault(f"{key}: the output has no place for it")
        numbers = [kinds.number(placement.regions) for placement in placements]
        tensors.require_whole(key, info.shape, numbers)
        records.add(placements, numbers, ITEMSIZE[info.dtype])
    records.require_filled()


def multiplicity(boxes: Collection[Box], rows: int, cols: int) -> tuple[int, int]:
    """(least, most): the smallest and the largest number of these rectangles that cover one element of a matrix.

    Raises ValueError for a rectangle that exceeds the matrix.
    """
    if not rows or not cols:
        return 1, 1
    for box in boxes:
        if not (0 <= box.row0 <= box.row1 <= rows and 0 <= box.col0 <= box.col1 <= cols):
            raise ValueError(f"{box} reaches out of a matrix of {rows} rows and {cols} columns")
    counts: list[int] = []
    for crossing in _by_rows(boxes, rows):
        columns = [(box.col0, box.col1) for box in crossing]
        counts += _along(columns, cols)
    return min(counts), max(counts)


def _by_rows(boxes: Collection[Box], rows: int) -> Iterator[list[Box]]:
    """Yield the rectangles that cover each stretch of rows between two neighbouring edges, from the first row on."""
    edges = {0, rows}
    for box in boxes:
        edges |= {box.row0, box.row1}
    waiting = sorted(boxes, reverse=True)
    crossing: list[Box] = []
    for top, _ in pairwise(sorted(edges)):
        while waiting and waiting[-1].row0 <= top:
            crossing.append(waiting.pop())
        crossing = [box for box in crossing if box.row1 > top]
        yield crossing


def _along(runs: Collection[tuple[int, int]], length: int) -> list[int]:
    """For each stretch between two neighbouring ends of runs, the number of runs that cover it."""
    changes = {0: 0, length: 0}
    for start, stop in runs:
        changes[start] = changes.get(start, 0) + 1
        changes[stop] = changes.get(stop, 0) - 1
    counts, count = list[int](), 0
    for position in sorted(changes)[:-1]:
        count += changes[position]
        counts.append(count)
    return counts


class _Kinds:
    """Numbers lists of regions, so that equal lists have the same number."""

    def __init__(self) -> None:
        self.regions: list[tuple[Region, ...]] = []
        self.areas: list[int] = []
        """The number of elements that the regions of each kind fill."""
        self._by_identity: dict[int, int] = {}
        """Placements of one row share one list of regions. Identity is faster to test than equality."""
        self._by_value: dict[tuple[Region, ...], int] = {}

    def number(self, regions: Sequence[Region]) -> int:
        known = self._by_identity.get(id(regions))
        if known is None:
            known = self._by_identity[id(regions)] = self._number(tuple(regions))
        return known

    def _number(self, regions: tuple[Region, ...]) -> int:
        number = self._by_value.setdefault(regions, len(self.regions))
        if number == len(self.regions):
            self.regions.append(regions)
            self.areas.append(_area(regions))
        return number


class _Tensors:
    """Checks that all of each tensor is written."""

    def __init__(self, kinds: _Kinds) -> None:
        self._kinds = kinds
        self._whole: set[tuple[Shape, frozenset[int]]] = set()

    def require_whole(self, key: Key, shape: Shape, numbers: Iterable[int]) -> None:
        """Raises CheckpointError unless the placements hold the whole tensor. numbers: the kinds of its placements."""
        placed = frozenset(numbers)
        if (shape, placed) not in self._whole:
            self._look(key, shape, placed)
            self._whole.add((shape, placed))

    def _look(self, key: Key, shape: Shape, placed: Iterable[int]) -> None:
        rows, cols = matrix_shape(shape)
        last_row = Box(rows - 1, rows, 0, cols)  # a vocabulary's padding may repeat it
        everywhere = list[Box]()
        for number in placed:
            boxes = [region.box for region in self._kinds.regions[number]]
            everywhere += boxes
            _, most = _counted(key, shape, [box for box in boxes if box != last_row])
            if most > 1:
                raise _fault(f"{key}: a tensor of the output would hold a part of it twice")
        least, _ = _counted(key, shape, everywhere)
        if least < 1:
            raise _fault(f"{key}: the output would not hold all of it, which is {list(shape)}")


def _counted(key: Key, shape: Shape, boxes: Collection[Box]) -> tuple[int, int]:
    try:
        return multiplicity(boxes, *matrix_shape(shape))
    except ValueError as error:
        raise _fault(f"{key}: is {list(shape)}, and {error}") from None


class _Part(NamedTuple):
    """The part of a record that one placement writes."""

    offset: int
    """Offset of the native tensor in the record, in bytes."""
    row_bytes: int
    """Bytes of one row of the native tensor."""
    itemsize: int
    kind: int
    """Number of the kind of its regions."""


class _Record:
    """A record that isn't completely written yet."""

    def __init__(self, nbytes: int) -> None:
        self.missing = nbytes
        self.parts: list[_Part] = []
        self.zeros: list[tuple[int, int]] = []
        """(offset, bytes) of each stretch of zeros."""


class _Records:
    """Checks that every byte of each record is written once."""

    def __init__(self, plan: OutputPlan, kinds: _Kinds) -> None:
        self._files, self._kinds = plan.files, kinds
        self._open: dict[tuple[str, str], _Record] = {}
        """Records that are begun. There are few at a time, because placements come in the order of the model."""
        self._filled = dict.fromkeys(plan.files, 0)
        """The number of completed records of each file."""
        self._alone: set[tuple[_Part, int]] = set()
        """(the only part of a record, bytes of the record) for kinds of records that were checked already."""
        self._together: set[tuple[tuple[_Part, ...], tuple[tuple[int, int], ...], int]] = set()
        """The same for records of several parts, and of zeros."""
        for file, record, offset, nbytes in plan.zeros:
            if nbytes:
                begun = self._begun(file, record)
                begun.zeros.append((offset, nbytes))
                self._fill(file, record, begun, nbytes)

    def add(self, placements: Sequence[Placement], numbers: Sequence[int], itemsize: int) -> None:
        """Enter the placements of one tensor. numbers: the kinds of their regions. itemsize: bytes of an element."""
        for placement, number in zip(placements, numbers, strict=True):
            nbytes = self._kinds.areas[number] * itemsize
            if not nbytes:  # all rows of this rank are padding
                continue
            file, record = placement.file, placement.record
            part = _Part(placement.offset, placement.row_bytes, itemsize, number)
            if (part, self._nbytes(file, record)) in self._alone:
                self._filled[file] += 1
                continue
            begun = self._begun(file, record)
            begun.parts.append(part)
            self._fill(file, record, begun, nbytes)

    def _nbytes(self, file: str, record: str) -> int:
        found = self._files[file].records.get(record) if file in self._files else None
        if found is None:
            raise _fault(f"{file}: {record}: would be written, and the output has no such record")
        return found.nbytes

    def _begun(self, file: str, record: str) -> _Record:
        where = (file, record)
        if where not in self._open:
            self._open[where] = _Record(self._nbytes(file, record))
        return self._open[where]

    def _fill(self, file: str, record: str, begun: _Record, nbytes: int) -> None:
        begun.missing -= nbytes
        if begun.missing < 0:
            raise _fault(f"{file}: {record}: would be written over twice")
        if begun.missing == 0:
            del self._open[file, record]
            self._filled[file] += 1
            self._look(file, record, begun)

    def _look(self, file: str, record: str, begun: _Record) -> None:
        """Check that the parts of a record, which have its size in total, are in the right places."""
        nbytes = self._files[file].records[record].nbytes
        kind = (tuple(begun.parts), tuple(begun.zeros), nbytes)
        if kind in self._together:
            return
        where = f"{file}: {record}"
        runs = [*begun.zeros, *self._matrices(where, begun.parts)]
        covered = 0
        for offset, size in sorted(runs):
            if offset != covered:
                first = min(offset, covered)
                raise _fault(f"{where}: bytes from {first} on would be written twice, or never")
            covered += size
        self._together.add(kind)
        if len(begun.parts) == 1 and not begun.zeros:
            (part,) = begun.parts
            self._alone.add((part, nbytes))

    def _matrices(self, where: str, parts: Sequence[_Part]) -> Iterable[tuple[int, int]]:
        """(offset, bytes) of each native tensor in a record.

        Raises CheckpointError unless its parts fill it exactly once.
        """
        for (offset, row_bytes, itemsize), group in groupby(
            sorted(parts), key=lambda part: part[:3]
        ):
            cols, odd = divmod(row_bytes, itemsize)
            if odd or not cols:
                raise _fault(f"{where}: has rows of {row_bytes} bytes, of elements of {itemsize}")
            kinds = [part.kind for part in group]
            elements = sum(self._kinds.areas[kind] for kind in kinds)
            rows = -(-elements // cols)
            self._require_matrix(where, kinds, rows, cols)
            yield offset, rows * row_bytes

    def _require_matrix(self, where: str, kinds: Iterable[int], rows: int, cols: int) -> None:
        """Raises CheckpointError unless the regions of these kinds fill a matrix exactly once."""
        boxes = list[Box]()
        for kind in kinds:
            for region in self._kinds.regions[kind]:
                if region.box.rows % region.order.together:
                    raise _fault(f"{where}: rows that change places would be parted")
                boxes += region.order.filled(region)
        try:
            counted = multiplicity(boxes, rows, cols)
        except ValueError as error:
            raise _fault(f"{where}: {error}") from None
        if counted != (1, 1):
            raise _fault(f"{where}: elements would be written twice, or never")

    def require_filled(self) -> None:
        for file, record in self._open:
            raise _fault(
                f"{file}: {record}: {self._open[file, record].missing:,} bytes would not be written"
            )
        expected: dict[int, int] = {}
        for file, layout in self._files.items():
            if id(layout) not in expected:  # thousands of files may share one layout
                expected[id(layout)] = _records_of(layout)
            if self._filled[file] != expected[id(layout)]:
                raise _fault(
                    f"{file}: {self._filled[file]} of {expected[id(layout)]} tensors would be written"
                )


def _records_of(layout: FileLayout) -> int:
    """The number of records that aren't empty."""
    return sum(record.nbytes > 0 for record in layout.records.values())


def _area(regions: Iterable[Region]) -> int:
    """The number of elements of a native tensor that regions fill."""
    area = 0
    for region in regions:
        for box in region.order.filled(region):
            area += box.rows * box.cols
    return area


def _fault(what: str) -> CheckpointError:
    return CheckpointError(f"{what}; {REPORT}", code="internal-error")
