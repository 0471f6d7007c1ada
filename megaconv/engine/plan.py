"""What a saver decides before the first tensor arrives: every output file, and where in it each canonical tensor goes."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from formats.output import FileLayout
from formats.tensor import Box
from megaconv.errors import NotExpressible
from megaconv.model.ir import WEIGHT, Header, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.model.training import MASTER

MAX_WORKERS = 8
BLOCK_BYTES = 2 << 20
"""Tensors are moved in blocks of this size: large enough for the disk, small enough for the caches (benchmarks/convert.py)."""


class Placement(NamedTuple):
    """Rectangles of one canonical tensor and the native tensor that they are written into."""

    file: str
    record: str
    row_bytes: int
    """Of the native tensor."""
    regions: Sequence[Region]
    offset: int = 0
    """Bytes in the record before the native tensor, which may be one of several there."""
    shift: int = 0
    """What is added to the tensor's values, as they are in the stream."""


def native_dtype(header: Header, native: NativeTensor, slot: str = WEIGHT) -> str:
    """Of a native tensor that is to be written. Raises NotExpressible where its parts are of several."""
    dtypes = {header.manifest[Key(name, slot)].dtype for name in native.parts}
    if len(dtypes) > 1:
        raise NotExpressible(
            f"{native.name}: would join tensors of {' and '.join(sorted(dtypes))}; give --dtype to have them all the same"
        )
    return dtypes.pop()


def native_shift(header: Header, shift: int, key: Key) -> int:
    """What has to be added to a tensor of the stream for a native one with this shift; to moments of an optimizer nothing."""
    return shift - header.shifts.get(key, 0) if key.slot in (WEIGHT, MASTER) else 0


def needed_boxes(placements: Sequence[Placement]) -> list[Box]:
    """Rectangles in row order, without overlap, that hold all of a canonical tensor that these placements need.

    Their rows are exactly those needed; their columns reach from the first to the last that any row needs.
    """
    boxes = sorted(region.box for placement in placements for region in placement.regions)
    col0, col1 = min((box.col0 for box in boxes), default=0), max((box.col1 for box in boxes), default=0)
    needed: list[Box] = []
    for box in boxes:
        row0 = box.row0
        if needed and row0 <= needed[-1].row1:
            row0, row1, *_ = needed.pop()
            box = box._replace(row1=max(row1, box.row1))
        needed.append(Box(row0, box.row1, col0, col1))
    return needed


@dataclass(frozen=True)
class OutputPlan:
    """A complete output. Whatever in its files is no canonical tensor and no zero padding is part of their layouts."""

    files: Mapping[str, FileLayout]
    """By path below the target."""
    placements: Mapping[Key, Sequence[Placement]]
    zeros: Sequence[tuple[str, str, int, int]] = ()
    """(file, record, offset in the record, bytes) that stay zero."""
    notices: Sequence[str] = ()
    """What a user should know about the output: what was left out, and what to do about it."""
    from_base: Sequence[str] = ()
    """Tensors and files that are copied from the original (`--base`)."""

    @property
    def nbytes(self) -> int:
        """Of all files together."""
        return sum(layout.size for layout in self.files.values())

    def identity(self, source: str) -> str:
        """Equal for two runs whose finished tensors are interchangeable."""
        files = {
            name: [layout.size, {key: list(record) for key, record in layout.records.items()}]
            for name, layout in self.files.items()
        }
        places = {
            f"{key.name}/{key.slot}": [[p.file, p.record, p.offset, p.shift, list(p.regions)] for p in placements]
            for key, placements in self.placements.items()
        }
        return hashlib.sha256(json.dumps([source, files, places], sort_keys=True).encode()).hexdigest()


def default_workers(*, writing: bool) -> int:
    """One thread a processor, and where files are written one more, since one or another always waits for the disk."""
    return min(MAX_WORKERS, (os.cpu_count() or 1) + writing)


def block_bytes(max_memory: int, workers: int) -> int:
    """The largest block with which `workers` threads, each with one block, one gathered copy and one to cast, keep the budget."""
    return max(4096, min(BLOCK_BYTES, max_memory // (4 * workers)))


def memory_needed(max_memory: int, workers: int) -> int:
    """Bytes of buffers that a conversion will hold at most."""
    return 4 * workers * block_bytes(max_memory, workers)
