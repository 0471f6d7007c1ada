"""The engine: takes tensors off the stream and writes their rectangles to their places in the staged files.

Every byte is read once into a block that stays in the processor's cache while it is hashed, cut, summed and written.
Threads suffice, since reading, writing, hashing and copying all release the interpreter. When a tensor is done its
pieces are entered in a ledger of written ranges; at the end every record has to be covered without gap or overlap.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib

from formats.output import FileLayout
from formats.staging import StagedFile, Staging
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, row_blocks
from megaconv.assembled import overlap, window
from megaconv.errors import Cancelled, CheckpointError
from megaconv.fingerprints import tensor_hasher
from megaconv.ir import Key
from megaconv.plan import OutputPlan, Placement
from megaconv.stream import Stream
from megaconv.table import Region

JOURNAL_SECONDS = 5.0
"""How often finished tensors are brought to disk and entered in the journal."""


class Run(NamedTuple):
    """A contiguous stretch that was written into a record."""

    offset: int
    nbytes: int
    crc: int


@dataclass
class _Finished:
    """One tensor that is completely written."""

    key: Key
    fingerprint: str
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
    """Writes one plan. Call run() once."""

    def __init__(
        self,
        plan: OutputPlan,
        staging: Staging,
        *,
        source: str,
        resume: bool,
        block_bytes: int,
        advance: Callable[[int], None],
    ) -> None:
        """source: identifies the input's exact state, for resuming. advance: called with the bytes of each finished block."""
        self._plan, self._block_bytes, self._advance, self._staging = plan, block_bytes, advance, staging
        entries = staging.open(plan.identity(source), resume=resume)
        self._done = {finished.key: finished for finished in map(_Finished.from_json, entries)}
        self._unrecorded: list[_Finished] = []
        self._lock = threading.Lock()
        self._files: dict[str, StagedFile] = {
            name: staging.file(name, layout.size, keep=bool(entries)) for name, layout in plan.files.items()
        }

    def run(self, stream: Stream, workers: int) -> dict[Key, str]:
        """Move everything; returns the fingerprint of each tensor. Raises the first error of any thread."""
        threads = [
            threading.Thread(target=self._work, args=(stream,), name=f"saver-{index}") for index in range(workers)
        ]
        for thread in threads:
            thread.start()
        recorded = time.monotonic()
        try:
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
                thread.join()
        if stream.error is not None:
            raise stream.error
        self._write_frames()
        return {key: finished.fingerprint for key, finished in self._done.items()}

    def _work(self, stream: Stream) -> None:
        buffers = _Buffers(self._block_bytes)
        try:
            for key, tensor in stream:
                if key in self._done:
                    self._advance(sum(run.nbytes for runs in self._done[key].runs.values() for run in runs))
                    continue
                finished = self._move(stream, key, tensor, buffers)
                with self._lock:
                    self._done[key] = finished
                    self._unrecorded.append(finished)
        except Cancelled:
            pass
        except BaseException as error:
            stream.fail(error)

    def _move(self, stream: Stream, key: Key, tensor: LazyTensor, buffers: "_Buffers") -> _Finished:
        hasher, itemsize = tensor_hasher(tensor), ITEMSIZE[tensor.dtype]
        targets = [
            _Target(self._files[place.file], self._plan.files[place.file], place, itemsize)
            for place in self._plan.placements[key]
        ]
        for box in row_blocks(tensor.shape, tensor.dtype, self._block_bytes):
            block = buffers.block(box.rows, box.cols * itemsize)
            if stream.error is not None:
                raise Cancelled("the run has ended")
            tensor.read_into(box, block)
            hasher.update(block.reshape(-1))
            for target in targets:
                target.write(box, block, buffers)
            self._advance(block.nbytes)
        finished = _Finished(key, hasher.hexdigest())
        for target in targets:
            finished.runs.setdefault((target.place.file, target.place.record), []).extend(target.runs)
        return finished

    def _record(self) -> None:
        with self._lock:
            finished, self._unrecorded = self._unrecorded, []
        for name in {file for item in finished for file, _ in item.runs}:
            self._files[name].sync()
        self._staging.record([item.to_json() for item in finished])

    def _write_frames(self) -> None:
        runs: dict[tuple[str, str], list[Run]] = {}
        for finished in self._done.values():
            for where, stretch in finished.runs.items():
                runs.setdefault(where, []).extend(stretch)
        for file, record, offset, nbytes in self._plan.zeros:
            runs.setdefault((file, record), []).append(Run(offset, nbytes, isal_zlib.crc32(bytes(nbytes))))
        for name, layout in self._plan.files.items():
            checksums = {
                record: _total(runs.get((name, record), []), size, f"{name}: {record}")
                for record, (_, size) in layout.records.items()
            }
            for offset, data in layout.frame(checksums):
                self._files[name].write(offset, data)


def _total(runs: list[Run], size: int, what: str) -> int:
    """CRC-32 of a whole record from those of its runs. Raises CheckpointError if they don't cover it exactly once."""
    position = crc = 0
    for run in sorted(runs):
        if run.offset != position:
            raise CheckpointError(
                f"{what}: bytes {min(position, run.offset)} to {max(position, run.offset)} were written twice or never; please report this"
            )
        crc = isal_zlib.crc32_combine(crc, run.crc, run.nbytes)
        position += run.nbytes
    if position != size:
        raise CheckpointError(f"{what}: {position} of {size} bytes were written; please report this")
    return crc


class _Buffers:
    """The two blocks that a worker owns: one to read into, one to gather cut rows in."""

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


class _Target:
    """One native tensor that a canonical tensor goes into."""

    def __init__(self, file: StagedFile, layout: FileLayout, place: Placement, itemsize: int) -> None:
        self.place, self.runs = place, list[Run]()
        self._file, self._base, self._itemsize = file, layout.records[place.record].offset, itemsize
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
            data = buffers.contiguous(window(block, box, wanted, self._itemsize))
            if region.repeat > 1:
                data = np.repeat(data, region.repeat, axis=0)
            row, col = region.row + wanted.row0 - region.box.row0, wanted.col0 - region.box.col0
            self._put(row * self.place.row_bytes + col * self._itemsize, data.reshape(-1))

    def _put(self, offset: int, data: Bytes) -> None:
        self._file.write(self._base + offset, data)
        self.runs.append(Run(offset, data.nbytes, self._checksum(data) if self._checksum else 0))
