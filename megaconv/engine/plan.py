"""A saver's plan, made before the first tensor arrives: all output files, and each canonical tensor's place in them."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from formats.output import FileLayout
from formats.tensor import ITEMSIZE, Box, LazyTensor, matrix_shape
from megaconv.errors import NotExpressible
from megaconv.model.ir import WEIGHT, Header, Key
from megaconv.model.natives import NativeTensor, Region
from megaconv.model.training import MASTER

MAX_WORKERS = 8
BLOCK_BYTES = 1 << 20
"""Bytes of the blocks in which tensors are moved.

The size is large enough for the disk and small enough for the caches (benchmarks/convert.py). For larger blocks Linux
looks for as much contiguous memory in its page cache. Blocks of 2 MiB took up to half more of the kernel's time on one
machine and none on another, and blocks of 4 MiB three times as much.
"""


class Placement(NamedTuple):
    """Rectangles of one canonical tensor, and the native tensor that they are written into."""

    file: str
    record: str
    row_bytes: int
    """Bytes of one row of the native tensor."""
    regions: Sequence[Region]
    offset: int = 0
    """Offset of the native tensor in the record, in bytes. A record may hold several native tensors."""
    shift: int = 0
    """The number that is added to the values of the stream's tensor."""


def native_dtype(header: Header, native: NativeTensor, slot: str = WEIGHT) -> str:
    """The dtype of a native tensor to be written. Raises NotExpressible if its parts have different dtypes."""
    dtypes = {header.manifest[Key(name, slot)].dtype for name in native.parts}
    if len(dtypes) > 1:
        raise NotExpressible(
            f"{native.name}: would join tensors of {' and '.join(sorted(dtypes))}; give --dtype to have them all the same"
        )
    return dtypes.pop()


def native_shift(header: Header, shift: int, key: Key) -> int:
    """The number to add to a stream's tensor for a native tensor with this shift; 0 for an optimizer's moments."""
    return shift - header.shifts.get(key, 0) if key.slot in (WEIGHT, MASTER) else 0


def needed_boxes(placements: Sequence[Placement]) -> list[Box]:
    """Rectangles in row order, without overlap, that hold all elements of a tensor that these placements need.

    The rows are exactly the needed ones. The columns reach from the first to the last column that any row needs.
    """
    boxes = sorted(region.box for placement in placements for region in placement.regions)
    first_col = min((box.col0 for box in boxes), default=0)
    end_col = max((box.col1 for box in boxes), default=0)
    needed: list[Box] = []
    for row0, row1, _, _ in boxes:
        if needed and row0 <= needed[-1].row1:
            before = needed.pop()
            row0, row1 = before.row0, max(before.row1, row1)
        needed.append(Box(row0, row1, first_col, end_col))
    return needed


def add_placements(
    placements: dict[Key, list[Placement]],
    header: Header,
    native: NativeTensor,
    file: str,
    record: str,
    slot: str = WEIGHT,
) -> None:
    """Add the place of each part of a native tensor, which is a whole record of a file."""
    _, cols = matrix_shape(native.shape)
    row_bytes = cols * ITEMSIZE[native_dtype(header, native, slot)]
    for name, regions in native.parts.items():
        placement = Placement(file, record, row_bytes, regions)
        placements.setdefault(Key(name, slot), []).append(placement)


Zeros = tuple[str, str, int, int]
"""(file, record, offset in the record, bytes) of a stretch that stays zero."""


def padding_of(
    header: Header, native: NativeTensor, file: str, record: str, slot: str = WEIGHT
) -> Iterator[Zeros]:
    """Yield the stretch of a native tensor's padding rows, if it has any."""
    if native.padding_rows:
        rows, cols = matrix_shape(native.shape)
        row_bytes = cols * ITEMSIZE[native_dtype(header, native, slot)]
        filled = rows - native.padding_rows
        yield file, record, filled * row_bytes, native.padding_rows * row_bytes


@dataclass(frozen=True)
class OutputPlan:
    """A complete output.

    The layout of a file contains every byte that is neither a canonical tensor nor zero padding.
    """

    files: Mapping[str, FileLayout]
    """File layouts by path below the target."""
    placements: Mapping[Key, Sequence[Placement]]
    zeros: Sequence[Zeros] = ()
    notices: Sequence[str] = ()
    """Notices for the user: for example, what was left out, and what to do about it."""
    from_base: Sequence[str] = ()
    """Tensors and files that are copied from the original (`--base`)."""
    read_back: Callable[[Path], dict[str, LazyTensor]] | None = None
    """As `read_back` of the saver, for an output that no loader reads although others of the saver are read."""

    @property
    def nbytes(self) -> int:
        """The size of all files together in bytes."""
        return sum(layout.size for layout in self.files.values())

    def identity(self) -> dict[str, str]:
        """Digests that are equal for two runs with interchangeable finished tensors, if their sources are equal.

        The keys are names for messages.
        """
        files = {
            name: [layout.size, {key: list(record) for key, record in layout.records.items()}]
            for name, layout in self.files.items()
        }
        places = {
            f"{key.name}/{key.slot}": [
                [place.file, place.record, place.offset, place.shift, list(place.regions)]
                for place in placements
            ]
            for key, placements in self.placements.items()
        }
        return {
            "the number of output files": f"{len(self.files):,}",
            "the size of the output": f"{self.nbytes:,} bytes",
            "the layout of the output": hashlib.sha256(
                json.dumps([files, places], sort_keys=True, default=repr).encode()
            ).hexdigest(),
        }


def default_workers(*, writing: bool) -> int:
    """The default number of threads: one per processor, and one more for writing.

    When writing, some thread always waits for the disk.
    """
    return min(MAX_WORKERS, (os.cpu_count() or 1) + writing)


def block_bytes(max_memory: int, workers: int) -> int:
    """The largest block size in bytes that keeps the memory budget.

    Each of the `workers` threads holds one block, one gathered copy, and blocks for a cast.
    """
    return max(4096, min(BLOCK_BYTES, max_memory // (4 * workers)))


def memory_needed(max_memory: int, workers: int) -> int:
    """The largest number of bytes of buffers that a conversion holds."""
    return 4 * workers * block_bytes(max_memory, workers)
