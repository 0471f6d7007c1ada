"""An output file in a staging directory. Any thread writes at any position, and writing to the disk starts early."""

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from threading import Lock

from formats import allocation
from formats.errors import CheckpointError, NotEnoughSpace, UnsafeContent
from formats.full_writes import write_at
from formats.tensor import Bytes

_WRITEBACK_BYTES = 16 << 20
"""Bytes of a file that are on their way to the disk together."""
_SYNC_FILE_RANGE_WRITE = 2
# None on systems other than Linux.
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


def write_error(error: OSError, path: Path) -> CheckpointError:
    """The error for people after a write failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NotEnoughSpace(
            f"{path}: the disk is full; free some space or choose another place, nothing was left behind"
        )
    if error.errno == errno.ELOOP:
        return UnsafeContent(
            f"{path}: is a link, which an output is never written through; remove it"
        )
    return CheckpointError(f"{path}: can't be written: {error.strerror or error}")


class StagedFile:
    """An output file of known size. Any thread may write at any position."""

    def __init__(self, path: Path, size: int, *, keep: bool) -> None:
        self.path = path
        self._writing = Lock()
        self._waiting = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = (
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if keep else os.O_TRUNC)
            )
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise write_error(error, path) from error
        try:
            allocation.allocate(self._descriptor, size)
        except OSError as error:
            with contextlib.suppress(CheckpointError):
                self.close()
            raise write_error(error, path) from error

    def write(self, offset: int, data: Bytes | bytes) -> None:
        """Write contiguous bytes at their offset. From time to time, start the way of all bytes to the disk."""
        view = memoryview(data) if isinstance(data, bytes) else data.data.cast("B")
        try:
            # The kernel lets one thread write a file and others spin. With this lock they sleep, and free a processor.
            with self._writing:
                write_at(self._descriptor, view, offset)
                self._waiting += len(view)
                are_many = self._waiting >= _WRITEBACK_BYTES
                if are_many:
                    self._waiting = 0
        except OSError as error:
            raise write_error(error, self.path) from error
        if are_many:
            self._start_writeback()

    def _start_writeback(self) -> None:
        """Keep the disk busy from the beginning, so the final fsync has little left to do. This is only a hint."""
        if _sync_file_range is not None:
            start, to_the_end = ctypes.c_int64(0), ctypes.c_int64(0)
            _sync_file_range(self._descriptor, start, to_the_end, _SYNC_FILE_RANGE_WRITE)

    def holds(self, start: int, end: int) -> bool:
        """True: sync() brings any range to the disk."""
        return True

    def sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise write_error(error, self.path) from error

    def close(self) -> None:
        """Close the file. It may be called again, even after an error: the descriptor may then belong to another file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError as error:
                raise write_error(error, self.path) from error
