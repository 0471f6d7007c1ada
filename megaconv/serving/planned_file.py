"""One file of a planned output, whose bytes are computed when they are read. Nothing is written.

A range of the file consists of bytes of headers and of rows of native tensors. A native tensor consists of regions of
canonical tensors. To read some rows, only the rectangles of the canonical tensors are read that these rows hold.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from formats.output import FileLayout
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, box_blocks
from megaconv.engine.plan import BLOCK_BYTES, OutputPlan, Placement
from megaconv.model.ir import Key
from megaconv.model.regions import PLAIN, Region
from megaconv.model.spellings.transposed import AS_COLUMNS
from megaconv.values.shifted import add_or_refuse


class Placed(NamedTuple):
    """A canonical tensor's part of a native tensor."""

    start: int
    """The first byte of the native tensor in the file."""
    place: Placement
    key: Key
    tensor: LazyTensor


@dataclass(frozen=True)
class PlannedFile:
    """A file of an output plan that needs no checksums. Any thread may read it."""

    layout: FileLayout
    parts: tuple[Placed, ...]

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.layout.size

    @cached_property
    def _headers(self) -> tuple[tuple[int, bytes], ...]:
        return tuple(self.layout.headers({}))

    @cached_property
    def _records(self) -> tuple[list[int], list[list[Placed]]]:
        """The first bytes of all records in ascending order, and the parts of each."""
        by_record: dict[str, list[Placed]] = {}
        for part in self.parts:
            by_record.setdefault(part.place.record, []).append(part)
        starts = {record: self.layout.records[record].offset for record in by_record}
        ordered = sorted(by_record, key=lambda record: starts[record])
        return [starts[record] for record in ordered], [by_record[record] for record in ordered]

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes `start` to `stop` of the file. Raises CheckpointError if the source can't be read."""
        found = bytearray(stop - start)
        for offset, content in self._headers:
            first, last = max(start, offset), min(stop, offset + len(content))
            if first < last:
                found[first - start : last - start] = content[first - offset : last - offset]
        for part in self._overlapping(start, stop):
            _read(part, _Window(found, start, part, ITEMSIZE[part.tensor.dtype]))
        return found

    def _overlapping(self, start: int, stop: int) -> Iterable[Placed]:
        """The parts of the records that overlap a range of bytes."""
        starts, parts = self._records
        first = max(0, bisect_right(starts, start) - 1)
        for number in range(first, bisect_right(starts, stop - 1)):
            yield from parts[number]


def planned_files(plan: OutputPlan, tensors: Mapping[Key, LazyTensor]) -> dict[str, PlannedFile]:
    """The files of a plan by name. tensors: the canonical tensors, as the plan places them."""
    parts: dict[str, list[Placed]] = {name: [] for name in plan.files}
    for key, places in plan.placements.items():
        for place in places:
            record = plan.files[place.file].records[place.record]
            parts[place.file].append(Placed(record.offset + place.offset, place, key, tensors[key]))
    return {name: PlannedFile(layout, tuple(parts[name])) for name, layout in plan.files.items()}


class _Window:
    """A range of bytes of a file that receives rectangles of a native tensor, as a NativeOutput."""

    def __init__(self, target: bytearray, start: int, part: Placed, itemsize: int) -> None:
        """start: the first byte of the range in the file."""
        self.itemsize = itemsize
        self._bytes = np.frombuffer(target, np.uint8)
        self._row_bytes = part.place.row_bytes
        self._native = part.start - start
        """Place of the native tensor's first byte in the range; negative if it begins before it."""

    @property
    def rows(self) -> range:
        """The rows of the native tensor that overlap the range."""
        first = max(0, -self._native // self._row_bytes)
        end = -(-(len(self._bytes) - self._native) // self._row_bytes)
        return range(first, max(first, end))

    def scratch(self, box: Box) -> Bytes:
        return np.empty((box.rows, box.cols * self.itemsize), np.uint8)

    def write(self, box: Box, rows: Bytes) -> None:
        """Keep the bytes of a rectangle that lie in the range."""
        if rows.shape[1] == self._row_bytes:
            first = self._native + box.row0 * self._row_bytes
            self._keep(first, np.ascontiguousarray(rows).reshape(-1))
            return
        first = self._native + box.row0 * self._row_bytes + box.col0 * self.itemsize
        for number, row in enumerate(rows):
            self._keep(first + number * self._row_bytes, row)

    def _keep(self, first: int, data: Bytes) -> None:
        start, stop = max(0, first), min(len(self._bytes), first + len(data))
        if start < stop:
            self._bytes[start:stop] = data[start - first : stop - first]


def _read(part: Placed, window: _Window) -> None:
    """Read a part's bytes of a window."""
    for region in part.place.regions:
        wanted = _wanted(region, window.rows)
        if wanted is None:
            continue
        for box in box_blocks(wanted, part.tensor.dtype, BLOCK_BYTES):
            block = np.empty((box.rows, box.cols * window.itemsize), np.uint8)
            part.tensor.read_into(box, block)
            if part.place.shift:
                block = add_or_refuse(block, part.tensor.dtype, part.place.shift, str(part.key))
            region.order.write(region, box, window, block)


def _wanted(region: Region, rows: range) -> Box | None:
    """The rectangle of the canonical tensor that some native rows need; None if they need nothing of the region."""
    for filled in region.order.filled(region):
        first, end = max(rows.start, filled.row0), min(rows.stop, filled.row1)
        if first >= end:
            continue
        box = region.box
        if region.order == PLAIN:
            return box._replace(
                row0=box.row0 + first - filled.row0, row1=box.row0 + end - filled.row0
            )
        if region.order == AS_COLUMNS:
            return box._replace(
                col0=box.col0 + first - filled.row0, col1=box.col0 + end - filled.row0
            )
        return box  # other orders mix the rows of a region
    return None
