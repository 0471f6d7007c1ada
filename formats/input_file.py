"""A file of a checkpoint that is only read, or the stand-in of a remote object."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from formats.entry_check import Entry, EntryCheck
from formats.errors import CorruptCheckpoint
from formats.lazy_numpy import Bytes
from formats.opened import note_checked
from formats.partial_files import PartialFile, Span
from formats.partial_files import find as find_partial
from formats.regular_files import open_regular, regular_size


def _size(path: Path) -> int:
    """The size of a checkpoint's file. Raises CorruptCheckpoint, with a remedy for a missing one."""
    try:
        return regular_size(path)
    except CorruptCheckpoint as error:
        if error.code != "missing-file":
            raise
        raise CorruptCheckpoint(f"{error}; is the copy complete?", code=error.code) from None


@dataclass
class InputFile:
    """A file that is only read, by position, from any thread. It is opened at the first read."""

    path: Path
    size: int
    checks: list[EntryCheck] = field(default_factory=list, compare=False, repr=False)
    """Checks of its zip entries that were looked up."""
    begun: set[Entry] = field(default_factory=set, compare=False, repr=False)
    """Entries that were read partly, so that their checksums are still to be compared."""
    _partial: PartialFile | None = field(default=None, compare=False, repr=False)
    """The partial file, if only some of the bytes are local."""
    _descriptor: int | None = field(default=None, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    @classmethod
    def open(cls, path: Path) -> "InputFile":
        """The file at a path. Raises CorruptCheckpoint if it doesn't exist or is not regular."""
        file = cls(path, _size(path), _partial=find_partial(path))
        note_checked(file)
        return file

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the file for another process of this machine, which opens the file itself."""
        if self._partial is not None:
            raise TypeError(f"{self.path}: only this process can fetch what is missing of it")
        return InputFile, (self.path, self.size, self.checks)

    def _open(self) -> int:
        with self._lock:
            if self._descriptor is None:
                self._descriptor = open_regular(self.path)
            return self._descriptor

    def read_into(self, offset: int, out: Bytes, tensor: Span | None = None) -> None:
        """Fill a contiguous buffer with the bytes from offset on.

        tensor: the range of the tensor that is read. A stand-in fetches the next bytes of the tensor ahead.
        """
        if self._partial is None:
            self._fill(offset, out.data.cast("B"))
        else:
            self._partial.read_into(offset, out.data.cast("B"), tensor)

    def announce(self, tensor: Span) -> None:
        """Announce a tensor that will be read completely. A stand-in fetches it ahead."""
        if self._partial is not None:
            self._partial.announce(tensor)

    def expect(self, spans: Sequence[Span]) -> None:
        """Announce small ranges that will be read one by one. A stand-in fetches them together."""
        if self._partial is not None:
            inside = [(start, min(end, self.size)) for start, end in spans if start < self.size]
            self._partial.expect(inside)

    def _fill(self, offset: int, view: memoryview) -> None:
        try:
            descriptor = self._descriptor if self._descriptor is not None else self._open()
            while view:
                count = os.preadv(descriptor, [view], offset)
                if not count:
                    raise CorruptCheckpoint(
                        f"{self.path}: ends at byte {offset}, before its last tensor; was it changed while it was read?",
                        code="truncated-file",
                    )
                view, offset = view[count:], offset + count
        except OSError as error:
            raise CorruptCheckpoint(f"{self.path}: can't be read: {error.strerror}") from error

    def read(self, offset: int, count: int) -> bytes:
        """The `count` bytes from offset on. Raises CorruptCheckpoint if the file is shorter."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise CorruptCheckpoint(
                f"{self.path}: {count} bytes at {offset} were expected, but the file has {self.size}; is the copy complete?",
                code="truncated-file",
            )
        if self._partial is not None:
            return self._partial.read(offset, count)
        out = bytearray(count)
        self._fill(offset, memoryview(out))
        return bytes(out)

    def require(self, start: int, end: int) -> None:
        """Put a range into the local file, for a memory map."""
        if self._partial is not None:
            self._partial.require(start, end)

    @property
    def is_partial(self) -> bool:
        """True for a stand-in, whose local file has holes."""
        return self._partial is not None

    def checked(self, start: int, size: int, crc: int) -> EntryCheck:
        """A new check of a zip entry in the file."""
        check = EntryCheck(self.path, start, size, crc, self.begun)
        self.checks.append(check)
        return check

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. It may be called again, even after an error: the descriptor may then belong to another file."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                with contextlib.suppress(OSError):  # nothing was written through it
                    os.close(descriptor)
