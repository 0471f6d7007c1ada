"""The engine: takes tensors off the stream, and writes their rectangles to their places in the staged files.

Every byte is read once, into a block that stays in the processor's cache while it is hashed, sharded, summed and
written. Threads suffice, because reading, writing, hashing and copying all release the interpreter lock. When a tensor
is done, its pieces are entered in a ledger of written ranges. At the end, these ranges must cover every record without
gap or overlap.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from formats import partial_files
from formats.entry_check import Entry
from formats.opened import begun_entries
from formats.output import Unwritten
from formats.partial_files import displayed, local
from formats.target import OutputFile, Target
from formats.tensor import LazyTensor, announce_in_step, byte_count, check_later
from megaconv.engine.early_headers import EarlyHeaders
from megaconv.engine.in_step import in_step
from megaconv.engine.moving import Buffers, Destination, Moving
from megaconv.engine.parts import PartPlan
from megaconv.engine.runs import Run, total, zeros
from megaconv.engine.shares import Share
from megaconv.engine.stream import MAX_WAITING, Stream, Unit
from megaconv.errors import Cancelled
from megaconv.model.ir import Key

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
        buffers = Buffers(self._block_bytes)
        try:
            for unit in stream:
                if partial_files.exist():
                    self._announce([unit, *stream.upcoming(MAX_WAITING)])
                begun = [self._begin_move(*each, buffers) for each in unit if self._is_left(*each)]
                self._move(stream, begun)
                for moved in begun:
                    finished = _Finished(moved.key, moved.fingerprint(), moved.runs())
                    if self._early is not None:
                        self._early.enter(finished.runs)
                    with self._lock:
                        self._done[finished.key] = finished
                        self._unrecorded.append(finished)
        except Cancelled:
            pass
        except BaseException as error:
            stream.fail(error)

    def _announce(self, upcoming: Sequence[Unit]) -> None:
        """Have tensors that come next fetched ahead, if all of their bytes are needed."""
        with self._lock:
            found = ([each for each in unit if self._is_new(each[0])] for unit in upcoming)
            new = [unit for unit in found if unit]
            self._announced.update(key for unit in new for key, _ in unit)
        for unit in new:
            announce_in_step([tensor for _, tensor in unit])

    def _is_new(self, key: Key) -> bool:
        is_needed = key in self._hashed and key not in self._done
        return is_needed and key not in self._announced

    def _is_left(self, key: Key, tensor: LazyTensor) -> bool:
        """True if a tensor is still to be moved: not finished by an earlier run, and not only for another rank."""
        if key in self._done:
            self._advance(byte_count(tensor.shape, tensor.dtype) if key in self._hashed else 0)
            return False
        return key in self._hashed or key in self._plan.placements

    def _begin_move(self, key: Key, tensor: LazyTensor, buffers: Buffers) -> Moving:
        destinations = [
            Destination(
                place,
                self._files[place.file],
                self._plan.files[place.file],
                key,
                tensor.dtype,
                buffers,
            )
            for place in self._plan.placements.get(key, ())
        ]
        advance = self._advance if key in self._hashed else None
        return Moving(key, tensor, destinations, buffers, advance)

    def _move(self, stream: Stream, unit: Sequence[Moving]) -> None:
        """Move tensors in step."""
        for number, box in in_step([(each.rows, each.blocks(self._block_bytes)) for each in unit]):
            if stream.error is not None:
                raise Cancelled("the run has ended")
            unit[number].move(box)

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
