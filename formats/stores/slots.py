"""Places for parts that wait: until all of their bytes are written, and until the store has them.

    memory    each part has a buffer
    spool     parts grow in one sparse file of the local disk; a part is in memory only while it is sent

The bytes of all places are known before the first byte. A writer that needs a place waits until a part was sent.
"""

import os
import tempfile
import threading
from pathlib import Path
from typing import Protocol

from formats import allocation
from formats.errors import CheckpointError, NotEnoughSpace
from formats.full_writes import write_at
from formats.lazy_numpy import np
from formats.stores import buffers

STUCK_SECONDS = 330.0
"""Longest time in which no part is sent while writers wait. A store that fails ends the run earlier by itself."""


class Slot(Protocol):
    """The place of one part. It begins as zeros."""

    def put(self, at: int, data: memoryview) -> None: ...

    def content(self) -> bytearray: ...

    def free(self) -> None: ...


class Slots:
    """Places of a number of bytes together. Any thread may use it."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._taken = nbytes, 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self.most = 0
        """The largest number of bytes that were taken at once."""

    def take(self, size: int) -> Slot:
        """A place for a part of `size` bytes. Waits while all are taken. Raises the error of `fail`."""
        amount = self._amount(size)
        with self._changed:
            while self._taken + amount > self._nbytes and self._taken and self._error is None:
                if not self._changed.wait(STUCK_SECONDS):
                    raise CheckpointError(
                        f"no part could be sent for {STUCK_SECONDS:.0f} seconds while all places are taken; please report this",
                        code="internal-error",
                    )
            if self._error is not None:
                raise self._error
            self._taken += amount
            self.most = max(self.most, self._taken)
        return self._slot(size)

    def give_back(self, size: int) -> None:
        """Note that a part of this size has left its place."""
        with self._changed:
            self._taken -= self._amount(size)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End all that wait with an error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Give everything back."""

    def _amount(self, size: int) -> int:
        """The bytes that a part takes."""
        return size

    def _slot(self, size: int) -> Slot:
        return _Buffer(self, size)


class _Buffer:
    """A place in memory."""

    def __init__(self, slots: Slots, size: int) -> None:
        self._slots, self._bytes = slots, buffers.take(size)
        np.frombuffer(self._bytes, np.uint8).fill(0)  # does not stop other threads

    def put(self, at: int, data: memoryview) -> None:
        self._bytes[at : at + len(data)] = data

    def content(self) -> bytearray:
        return self._bytes

    def free(self) -> None:
        content, self._bytes = self._bytes, bytearray()
        buffers.give_back(content)
        self._slots.give_back(len(content))


class Spool(Slots):
    """Places in a sparse file, which has no name: it is gone when the process ends, also by a kill."""

    def __init__(self, count: int, slot_bytes: int, directory: Path) -> None:
        """Raises NotEnoughSpace if the directory has too little space, CheckpointError if no file can be made there."""
        super().__init__(count * slot_bytes)
        self.slot_bytes = slot_bytes
        self._free = list(range(count))
        self._lock = threading.Lock()
        require_space(directory, count * slot_bytes)
        try:
            self._file = tempfile.TemporaryFile(prefix="megaconv-spool-", dir=directory)  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(
                f"--spool {directory}: no file can be made there: {error.strerror}"
            ) from error

    def _amount(self, size: int) -> int:
        return self.slot_bytes

    def _slot(self, size: int) -> Slot:
        with self._lock:
            return _Range(self, self._free.pop(), size)

    def leave(self, number: int) -> None:
        """Empty a place for the next part."""
        with self._lock:
            allocation.discard(self.descriptor, number * self.slot_bytes, self.slot_bytes)
            self._free.append(number)
        self.give_back(self.slot_bytes)

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


class _Range:
    """A place in the spool."""

    def __init__(self, spool: Spool, number: int, size: int) -> None:
        self._spool, self._number, self._size = spool, number, size

    def put(self, at: int, data: memoryview) -> None:
        offset = self._number * self._spool.slot_bytes + at
        try:
            write_at(self._spool.descriptor, data, offset)
        except OSError as error:
            raise NotEnoughSpace(
                f"the spool can't be written: {error.strerror}; choose another disk with --spool"
            ) from error

    def content(self) -> bytearray:
        found = bytearray(self._size)
        # A part whose end nobody wrote may lie behind the end of the file; its bytes are zeros.
        os.preadv(
            self._spool.descriptor,
            [memoryview(found)],
            self._number * self._spool.slot_bytes,
        )
        return found

    def free(self) -> None:
        self._spool.leave(self._number)


def require_space(directory: Path, nbytes: int) -> None:
    """Raise NotEnoughSpace if a directory's disk has less than `nbytes` free."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise CheckpointError(f"--spool {directory}: {error.strerror}") from error
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise NotEnoughSpace(
            f"--spool {directory}: {nbytes:,} bytes are needed for parts that wait, {free:,} are free; choose another disk"
        )
