"""The engine: takes tensors off the stream, and writes their rectangles to their places in the staged files.

Every byte is read once, into a block that stays in the processor's cache while it is hashed, sharded, summed and
written. Threads suffice, because reading, writing, hashing and copying all release the interpreter lock. When a tensor
is done, its pieces are entered in a ledger of written ranges. At the end, these ranges must cover every record without
gap or overlap.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from isal import isal_zlib

from formats.entry_check import Entry
from formats.opened import begun_entries
from formats.output import FileLayout, Unwritten
from formats.partial_files import displayed, local
from formats.target import OutputFile, Target
from formats.tensor import (
    ITEMSIZE,
    Box,
    Bytes,
    LazyTensor,
    announce,
    box_blocks,
    byte_count,
    check_later,
    matrix_shape,
)
from megaconv.engine.early_headers import EarlyHeaders
from megaconv.engine.fingerprints import tensor_hasher
from megaconv.engine.parts import PartPlan
from megaconv.engine.plan import Placement, needed_boxes
from megaconv.engine.runs import Run, total, zeros
from megaconv.engine.shares import Share
from megaconv.engine.stream import MAX_WAITING, Stream
from megaconv.errors import Cancelled, UsageError
from megaconv.model.assembled import overlap, window
from megaconv.model.ir import Key
from megaconv.model.natives import Region
from megaconv.values.shifted import add_or_refuse

JOURNAL_SECONDS = 5.0
"""Seconds between two journal entries. Finished tensors are flushed to disk before they are entered."""


_BEGUN = "begun"
"""The key of a journal entry for a zip entry that was read in part. Its checksum is still to be compared."""


@dataclass
class _Finished:
    """One tensor that is completely written."""

    key: Key
    fingerprint: str | None
    """The fingerprint; None if another rank computes it."""
    runs: dict[tuple[str, str], list[Run]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "tensor": list(self.key),
            "fingerprint": self.fingerprint,
            "runs": [[*where, runs] for where, runs in self.runs.items()],
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "_Finished":
        runs = {
            (file, record): [Run(*run) for run in stretch]
            for file, record, stretch in entry["runs"]
        }
        return cls(Key(*entry["tensor"]), entry["fingerprint"], runs)


class Transfer:
    """Executes one share of a plan. Call run() once."""

    def __init__(
        self,
        share: Share,
        staging: Target,
        *,
        source: Mapping[str, str],
        resume: bool,
        block_bytes: int,
        advance: Callable[[int], None],
        parts: PartPlan | None = None,
    ) -> None:
        """Prepare the transfer.

        source: the input's identity, for resuming. advance: called with the number of bytes of each hashed block.
        parts: the plan in parts, for a store.
        """
        plan = self._plan = share.plan
        self._hashed = frozenset(share.hashed)
        self._block_bytes, self._advance, self._staging = block_bytes, advance, staging
        sizes = {name: layout.size for name, layout in plan.files.items()}
        entries = staging.open({**source, **plan.identity()}, resume=resume, sizes=sizes)
        # Zip entries that an earlier run read in part. Their finished tensors aren't read again here.
        self._begun = {_entry(entry[_BEGUN]) for entry in entries if _BEGUN in entry}
        check_later(self._begun)
        self._done: dict[Key, _Finished] = {}
        for entry in entries:
            if _BEGUN not in entry:
                finished = _Finished.from_json(entry)
                self._done[finished.key] = finished
        self._announced: set[Key] = set()
        """The tensors that are fetched ahead, if they are in a store."""
        self._unrecorded: list[_Finished] = []
        self._lock = threading.Lock()
        self._files: dict[str, OutputFile] = {}
        for name, size in sizes.items():
            self._files[name] = self._file(name, size, parts, keep=bool(entries))
        self._early = None if parts is None else EarlyHeaders(plan, parts, self._write)

    def _file(self, name: str, size: int, parts: PartPlan | None, *, keep: bool) -> OutputFile:
        if parts is None or name not in parts.files:
            return self._staging.file(name, size, keep=keep)
        of_file = parts.files[name]
        known = [piece for piece in of_file.pieces if not piece.needs]
        unwritten = Unwritten(of_file.gaps, known)
        return self._staging.file(name, size, keep=keep, unwritten=unwritten)

    def _write(self, name: str, offset: int, data: bytes) -> None:
        self._files[name].write(offset, data)

    def run(self, stream: Stream, workers: int) -> dict[Key, str]:
        """Move all tensors.

        Returns the fingerprint of each tensor that is hashed here. Raises the first error of any thread.
        """
        threads = [
            threading.Thread(target=self._work, args=(stream,), name=f"saver-{index}")
            for index in range(workers)
        ]
        recorded = time.monotonic()
        pause = JOURNAL_SECONDS * self._staging.journal_pause
        try:
            self._begin()
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(0.05)
                if stream.error is not None:
                    self._staging.fail(stream.error)
                if time.monotonic() - recorded > pause:
                    self._record()
                    recorded = time.monotonic()
        except BaseException as error:
            stream.fail(error)
            self._staging.fail(error)
            raise
        finally:
            for thread in threads:
                if thread.is_alive():
                    # An interruption may have prevented a thread from starting. Such a thread can't be joined.
                    thread.join()
        if stream.error is not None:
            raise stream.error
        self._write_headers()
        if self._early is not None:
            self._staging.finish()
            self._record()
        return {
            key: finished.fingerprint
            for key, finished in self._done.items()
            if finished.fingerprint
        }

    def _begin(self) -> None:
        """Write what is known at once, and what finished tensors of an earlier run have completed."""
        if self._early is not None:
            self._early.begin()
            for finished in self._done.values():
                self._early.enter(finished.runs)

    def _work(self, stream: Stream) -> None:
        buffers = _Buffers(self._block_bytes)
        try:
            for key, tensor in stream:
                self._announce([(key, tensor), *stream.upcoming(MAX_WAITING)])
                hashed = key in self._hashed
                if key in self._done:
                    self._advance(byte_count(tensor.shape, tensor.dtype) if hashed else 0)
                    continue
                if not hashed and key not in self._plan.placements:
                    continue  # only another rank needs it
                finished = self._move(stream, key, tensor, buffers)
                if self._early is not None:
                    self._early.enter(finished.runs)
                with self._lock:
                    self._done[key] = finished
                    self._unrecorded.append(finished)
        except Cancelled:
            pass
        except BaseException as error:
            stream.fail(error)

    def _announce(self, upcoming: Sequence[tuple[Key, LazyTensor]]) -> None:
        """Have tensors that come next fetched ahead, if all of their bytes are needed."""
        with self._lock:
            new = [(key, tensor) for key, tensor in upcoming if self._is_new(key)]
            self._announced.update(key for key, _ in new)
        for _, tensor in new:
            announce(tensor)

    def _is_new(self, key: Key) -> bool:
        is_needed = key in self._hashed and key not in self._done
        return is_needed and key not in self._announced

    def _move(self, stream: Stream, key: Key, tensor: LazyTensor, buffers: "_Buffers") -> _Finished:
        places = self._plan.placements.get(key, ())
        targets = [self._target(place, key, tensor.dtype, buffers) for place in places]
        hasher = tensor_hasher(tensor) if key in self._hashed else None
        # The dequantized bytes, if readers get other values than are stored.
        as_read = getattr(tensor, "as_read", None)
        itemsize = ITEMSIZE[tensor.dtype]
        for box in self._blocks(tensor, places, whole=hasher is not None):
            block = buffers.block(box.rows, box.cols * itemsize)
            if stream.error is not None:
                raise Cancelled("the run has ended")
            tensor.read_into(box, block)
            for target in targets:
                target.write(box, block)
            if hasher is not None:
                read = block if as_read is None else as_read(box, block)
                hasher.update(read.reshape(-1))
                self._advance(read.nbytes)
        finished = _Finished(key, hasher.hexdigest() if hasher else None)
        for target in targets:
            where = target.place.file, target.place.record
            finished.runs.setdefault(where, []).extend(target.native.runs)
        return finished

    def _blocks(
        self, tensor: LazyTensor, places: Sequence[Placement], *, whole: bool
    ) -> Iterator[Box]:
        """Yield the blocks of a tensor that are read: all of it if `whole`, otherwise only what its places need."""
        rows, cols = matrix_shape(tensor.shape)
        wanted = [Box(0, rows, 0, cols)] if whole else needed_boxes(places)
        row_bytes = cols * ITEMSIZE[tensor.dtype]
        if getattr(tensor, "whole_rows", False) and row_bytes > self._block_bytes:
            raise UsageError(
                f"--max-memory: a row of {row_bytes:,} bytes doesn't fit into a block of {self._block_bytes:,}; allow more memory"
            )
        for box in wanted:
            yield from box_blocks(box, tensor.dtype, self._block_bytes)

    def _target(self, place: Placement, key: Key, dtype: str, buffers: "_Buffers") -> "_Target":
        layout = self._plan.files[place.file]
        native = _NativeFile(self._files[place.file], layout, place, dtype, buffers)
        return _Target(place, native, key, dtype, buffers)

    def _record(self) -> None:
        with self._lock:
            waiting, self._unrecorded = self._unrecorded, []
        finished: list[_Finished] = []
        later: list[_Finished] = []
        for item in waiting:
            (finished if self._is_held(item) else later).append(item)
        with self._lock:
            self._unrecorded += later
        for name in {file for item in finished for file, _ in item.runs}:
            self._files[name].sync()
        begun = [entry for entry in begun_entries() if entry not in self._begun]
        self._begun.update(begun)
        # Write these before the tensors: if the journal is truncated, every tensor in it still has its zip entries.
        self._staging.record(
            [{_BEGUN: [displayed(entry.path), *entry[1:]]} for entry in begun]
            + [item.to_json() for item in finished]
        )

    def _is_held(self, item: _Finished) -> bool:
        """True if a sync brings all of a tensor's bytes to where they stay."""
        for name, record in item.runs:
            start, nbytes = self._plan.files[name].records[record]
            if not self._files[name].holds(start, start + nbytes):
                return False
        return True

    def _write_headers(self) -> None:
        runs = self._all_runs()
        for name, layout in self._plan.files.items():
            checksums: dict[str, int] = {}
            for record, (_, nbytes) in layout.records.items():
                found = runs.get((name, record), [])
                checksums[record] = total(
                    found, nbytes, layout.needs_checksums, f"{name}: {record}"
                )
            if self._early is None:
                for offset, data in layout.headers(checksums):
                    self._files[name].write(offset, data)

    def _all_runs(self) -> dict[tuple[str, str], list[Run]]:
        """The ranges that were written or stay zero, by (file, record)."""
        runs: dict[tuple[str, str], list[Run]] = {}
        for finished in self._done.values():
            for where, stretch in finished.runs.items():
                runs.setdefault(where, []).extend(stretch)
        for file, record, offset, nbytes in self._plan.zeros:
            runs.setdefault((file, record), []).append(zeros(offset, nbytes))
        return runs


def _entry(stored: Sequence[Any]) -> Entry:
    """A zip entry in the journal. An object of a store has its URI there, since its stand-in is another in each run."""
    path, *rest = stored
    return Entry(local(path), *rest)


class _Buffers:
    """The two blocks that a worker owns: one to read into, one to rearrange rows in."""

    def __init__(self, size: int) -> None:
        self._read = np.empty(size, np.uint8)
        self._gather = np.empty(size, np.uint8)

    def block(self, rows: int, row_bytes: int) -> Bytes:
        return self._read[: rows * row_bytes].reshape(rows, row_bytes)

    def gather(self, rows: int, row_bytes: int) -> Bytes:
        return self._gather[: rows * row_bytes].reshape(rows, row_bytes)

    def contiguous(self, rows: Bytes) -> Bytes:
        """The same rows without gaps, if necessary as a copy in the second block."""
        if rows.flags.c_contiguous:
            return rows
        gathered = self.gather(*rows.shape)
        np.copyto(gathered, rows)
        return gathered


class _NativeFile:
    """A native tensor in a staged file. It notes the ranges of bytes that were written."""

    def __init__(
        self, file: OutputFile, layout: FileLayout, place: Placement, dtype: str, buffers: _Buffers
    ) -> None:
        self.itemsize = ITEMSIZE[dtype]
        self.runs = list[Run]()
        self._file, self._buffers = file, buffers
        self._row_bytes, self._offset = place.row_bytes, place.offset
        self._record_offset = layout.records[place.record].offset
        self._checksum = isal_zlib.crc32 if layout.needs_checksums else None

    def scratch(self, box: Box) -> Bytes:
        return self._buffers.gather(box.rows, box.cols * self.itemsize)

    def write(self, box: Box, rows: Bytes) -> None:
        """Write a rectangle: at once if it has full rows (or a single row), otherwise row by row."""
        offset = self._offset + box.row0 * self._row_bytes + box.col0 * self.itemsize
        is_one_range = rows.shape[1] == self._row_bytes or len(rows) == 1
        if is_one_range:
            self._write_range(offset, self._buffers.contiguous(rows).reshape(-1))
        elif self._checksum is not None:
            for row in rows:
                self._write_range(offset, row)
                offset += self._row_bytes
        else:
            # Without checksums, one entry stands for the whole rectangle.
            self.runs.append(Run(offset, rows.size, 0))
            for row in rows:
                self._file.write(self._record_offset + offset, row)
                offset += self._row_bytes

    def _write_range(self, offset: int, data: Bytes) -> None:
        self._file.write(self._record_offset + offset, data)
        checksum = self._checksum(data) if self._checksum is not None else 0
        self.runs.append(Run(offset, data.nbytes, checksum))


class _Target:
    """A canonical tensor's regions in one native tensor."""

    def __init__(
        self, place: Placement, native: _NativeFile, key: Key, dtype: str, buffers: _Buffers
    ) -> None:
        self.place, self.native = place, native
        self._key, self._dtype, self._buffers = key, dtype, buffers
        self._regions: Sequence[Region] = sorted(place.regions, key=lambda region: region.box.row1)
        self._ends = [region.box.row1 for region in self._regions]

    def write(self, box: Box, block: Bytes) -> None:
        """Write the part of a block that belongs into this native tensor. box: the block's place in the tensor."""
        for region in self._regions[bisect_left(self._ends, box.row0 + 1) :]:
            if region.box.row0 >= box.row1:
                break
            wanted = overlap(region.box, box)
            if wanted is not None:
                rows = self._shifted(window(block, box, wanted, self.native.itemsize))
                region.order.write(region, wanted, self.native, rows)

    def _shifted(self, rows: Bytes) -> Bytes:
        """The values as the native tensor stores them."""
        if not self.place.shift:
            return rows
        return add_or_refuse(
            self._buffers.contiguous(rows), self._dtype, self.place.shift, str(self._key)
        )
