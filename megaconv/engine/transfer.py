"""The engine: takes tensors off the stream and writes their rectangles to their places in the staged files.

Every byte is read once into a block that stays in the processor's cache while it is hashed, sharded, summed and written.
Threads suffice, since reading, writing, hashing and copying all release the interpreter. When a tensor is done its
pieces are entered in a ledger of written ranges; at the end every record has to be covered without gap or overlap.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib

from formats.entry_check import Entry
from formats.opened import begun_entries
from formats.output import FileLayout
from formats.staging import StagedFile, Staging
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, box_blocks, byte_count, check_later, matrix_shape
from megaconv.engine.assembled import halved_rows, overlap, paired_rows, transpose, window
from megaconv.engine.fingerprints import tensor_hasher
from megaconv.engine.plan import Placement, needed_boxes
from megaconv.engine.shares import Share
from megaconv.engine.shifted import add_or_refuse
from megaconv.engine.stream import Stream
from megaconv.errors import Cancelled, CheckpointError
from megaconv.model.ir import Key
from megaconv.model.natives import Region

JOURNAL_SECONDS = 5.0
"""How often finished tensors are brought to disk and entered in the journal."""


_BEGUN = "begun"
"""In the journal: an entry of a source's file that was read in part, whose checksum is still to be compared."""


class Run(NamedTuple):
    """A contiguous stretch that was written into a record."""

    offset: int
    nbytes: int
    crc: int


@dataclass
class _Finished:
    """One tensor that is completely written."""

    key: Key
    fingerprint: str | None
    """None where another rank makes it."""
    runs: dict[tuple[str, str], list[Run]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "tensor": list(self.key),
            "fingerprint": self.fingerprint,
            "runs": [[*where, runs] for where, runs in self.runs.items()],
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "_Finished":
        runs = {(file, record): [Run(*run) for run in stretch] for file, record, stretch in entry["runs"]}
        return cls(Key(*entry["tensor"]), entry["fingerprint"], runs)


class Transfer:
    """Does one share of a plan. Call run() once."""

    def __init__(
        self,
        share: Share,
        staging: Staging,
        *,
        source: str,
        resume: bool,
        block_bytes: int,
        advance: Callable[[int], None],
    ) -> None:
        """source: identifies the input's exact state, for resuming. advance: called with the bytes of each hashed block."""
        plan = self._plan = share.plan
        self._hashed = frozenset(share.hashed)
        self._block_bytes, self._advance, self._staging = block_bytes, advance, staging
        sizes = {name: layout.size for name, layout in plan.files.items()}
        entries = staging.open(plan.identity(source), resume=resume, sizes=sizes)
        # What an earlier run read of entries in part and made tensors of, which are not read again here.
        self._begun = {Entry(*entry[_BEGUN]) for entry in entries if _BEGUN in entry}
        check_later(self._begun)
        done = (_Finished.from_json(entry) for entry in entries if _BEGUN not in entry)
        self._done = {finished.key: finished for finished in done}
        self._unrecorded: list[_Finished] = []
        self._lock = threading.Lock()
        self._files: dict[str, StagedFile] = {
            name: staging.file(name, layout.size, keep=bool(entries)) for name, layout in plan.files.items()
        }

    def run(self, stream: Stream, workers: int) -> dict[Key, str]:
        """Move everything; returns the fingerprint of each tensor that is hashed here. Raises any thread's first error."""
        threads = [
            threading.Thread(target=self._work, args=(stream,), name=f"saver-{index}") for index in range(workers)
        ]
        recorded = time.monotonic()
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(0.05)
                if time.monotonic() - recorded > JOURNAL_SECONDS:
                    self._record()
                    recorded = time.monotonic()
        except BaseException as error:
            stream.fail(error)
            raise
        finally:
            for thread in threads:
                if thread.is_alive():  # one that an interrupt came before never started
                    thread.join()
        if stream.error is not None:
            raise stream.error
        self._write_headers()
        return {key: finished.fingerprint for key, finished in self._done.items() if finished.fingerprint}

    def _work(self, stream: Stream) -> None:
        buffers = _Buffers(self._block_bytes)
        try:
            for key, tensor in stream:
                hashed = key in self._hashed
                if key in self._done:
                    self._advance(byte_count(tensor.shape, tensor.dtype) if hashed else 0)
                    continue
                if not hashed and key not in self._plan.placements:
                    continue  # another rank's alone
                finished = self._move(stream, key, tensor, buffers)
                with self._lock:
                    self._done[key] = finished
                    self._unrecorded.append(finished)
        except Cancelled:
            pass
        except BaseException as error:
            stream.fail(error)

    def _move(self, stream: Stream, key: Key, tensor: LazyTensor, buffers: "_Buffers") -> _Finished:
        hasher, itemsize = tensor_hasher(tensor) if key in self._hashed else None, ITEMSIZE[tensor.dtype]
        places, (rows, cols) = self._plan.placements.get(key, ()), matrix_shape(tensor.shape)
        targets = [
            _Target(self._files[place.file], self._plan.files[place.file], place, key, tensor.dtype) for place in places
        ]
        wanted = [Box(0, rows, 0, cols)] if hasher else needed_boxes(places)
        for box in chain.from_iterable(box_blocks(part, tensor.dtype, self._block_bytes) for part in wanted):
            block = buffers.block(box.rows, box.cols * itemsize)
            if stream.error is not None:
                raise Cancelled("the run has ended")
            tensor.read_into(box, block)
            for target in targets:
                target.write(box, block, buffers)
            if hasher is not None:
                as_read = getattr(tensor, "as_read", None)  # of what readers get otherwise than it is stored
                read = block if as_read is None else as_read(box, block)
                hasher.update(read.reshape(-1))
                self._advance(read.nbytes)
        finished = _Finished(key, hasher.hexdigest() if hasher else None)
        for target in targets:
            finished.runs.setdefault((target.place.file, target.place.record), []).extend(target.runs)
        return finished

    def _record(self) -> None:
        with self._lock:
            finished, self._unrecorded = self._unrecorded, []
        for name in {file for item in finished for file, _ in item.runs}:
            self._files[name].sync()
        begun = [entry for entry in begun_entries() if entry not in self._begun]
        self._begun.update(begun)
        # In front of the tensors: of a journal that breaks off, what is there of it vouches for no tensor without them.
        self._staging.record([{_BEGUN: entry} for entry in begun] + [item.to_json() for item in finished])

    def _write_headers(self) -> None:
        runs: dict[tuple[str, str], list[Run]] = {}
        for finished in self._done.values():
            for where, stretch in finished.runs.items():
                runs.setdefault(where, []).extend(stretch)
        for file, record, offset, nbytes in self._plan.zeros:
            runs.setdefault((file, record), []).append(Run(offset, nbytes, isal_zlib.crc32(bytes(nbytes))))
        for name, layout in self._plan.files.items():
            checksums = {
                record: _total(runs.get((name, record), []), size, layout.needs_checksums, f"{name}: {record}")
                for record, (_, size) in layout.records.items()
            }
            for offset, data in layout.headers(checksums):
                self._files[name].write(offset, data)


def _total(runs: list[Run], size: int, checksummed: bool, what: str) -> int:
    """CRC-32 of a whole record from those of its runs. Raises CheckpointError if they don't cover it exactly once.

    Without checksums a run may stand for a rectangle, and only bytes are counted.
    """
    position = crc = 0
    for run in sorted(runs):
        if checksummed and run.offset != position:
            raise CheckpointError(
                f"{what}: bytes {min(position, run.offset)} to {max(position, run.offset)} were written twice or never; please report this",
                code="internal-error",
            )
        crc = isal_zlib.crc32_combine(crc, run.crc, run.nbytes)
        position += run.nbytes
    if position != size:
        raise CheckpointError(
            f"{what}: {position} of {size} bytes were written; please report this", code="internal-error"
        )
    return crc


class _Buffers:
    """The two blocks that a worker owns: one to read into, one to gather parts of rows in."""

    def __init__(self, size: int) -> None:
        self._read = np.empty(size, np.uint8)
        self._gather = np.empty(size, np.uint8)

    def block(self, rows: int, row_bytes: int) -> Bytes:
        return self._read[: rows * row_bytes].reshape(rows, row_bytes)

    def contiguous(self, rows: Bytes) -> Bytes:
        if rows.flags.c_contiguous:
            return rows
        gathered = self._gather[: rows.size].reshape(rows.shape)
        np.copyto(gathered, rows)
        return gathered

    def paired(self, rows: Bytes, head_dim: int) -> Bytes:
        """Whole heads with their two halves as pairs of rows; overwrites what contiguous() gave."""
        gathered = self._gather[: rows.size].reshape(rows.shape)
        heads, half, row_bytes = len(rows) // head_dim, head_dim // 2, rows.shape[1]
        pairs = rows.reshape(heads, 2, half, row_bytes).swapaxes(1, 2)
        np.copyto(gathered.reshape(heads, half, 2, row_bytes), pairs)
        return gathered


class _Target:
    """One native tensor that a canonical tensor goes into."""

    def __init__(self, file: StagedFile, layout: FileLayout, place: Placement, key: Key, dtype: str) -> None:
        self.place, self.runs = place, list[Run]()
        self._file, self._base, self._itemsize = file, layout.records[place.record].offset, ITEMSIZE[dtype]
        self._key, self._dtype = key, dtype
        self._checksum = isal_zlib.crc32 if layout.needs_checksums else None
        self._regions: Sequence[Region] = sorted(place.regions, key=lambda region: region.box.row1)
        self._ends = [region.box.row1 for region in self._regions]

    def write(self, box: Box, block: Bytes, buffers: _Buffers) -> None:
        """Write whatever of a block belongs here."""
        for region in self._regions[bisect_left(self._ends, box.row0 + 1) :]:
            if region.box.row0 >= box.row1:
                break
            wanted = overlap(region.box, box)
            if wanted is None:
                continue
            data = window(block, box, wanted, self._itemsize)
            down, right = wanted.row0 - region.box.row0, wanted.col0 - region.box.col0
            if region.pairs:
                for part, row in paired_rows(region.pairs, down, down + wanted.rows):
                    rows = data[part.start - down : part.stop - down]
                    made = rows if len(rows) == 1 else buffers.paired(rows, region.pairs)
                    self._write(region.row + row, region.col + right, made)
                continue
            if region.halves:
                for every_second, row in halved_rows(region.box.rows, down, down + wanted.rows):
                    self._write(region.row + row, region.col + right, buffers.contiguous(data[every_second]))
                continue
            data = buffers.contiguous(data)
            if self.place.shift:
                data = add_or_refuse(data, self._dtype, self.place.shift, str(self._key))
            if region.transposed:
                self._write(region.row + right, region.col + down, transpose(data, self._itemsize))
            else:
                for again in range(region.repeat):
                    self._write(region.row + down + again, region.col + right, data)

    def _write(self, row: int, col: int, data: Bytes) -> None:
        """A rectangle: at once where it is as wide as the native tensor (or a single row), else row by row."""
        offset = self.place.offset + row * self.place.row_bytes + col * self._itemsize
        if data.shape[1] == self.place.row_bytes or len(data) == 1:
            self._put(offset, data.reshape(-1))
            return
        for index, line in enumerate(data):
            if self._checksum is None:
                self._file.write(self._base + offset + index * self.place.row_bytes, line)
            else:
                self._put(offset + index * self.place.row_bytes, line)
        if self._checksum is None:
            self.runs.append(Run(offset, data.nbytes, 0))

    def _put(self, offset: int, data: Bytes) -> None:
        self._file.write(self._base + offset, data)
        self.runs.append(Run(offset, data.nbytes, self._checksum(data) if self._checksum else 0))
