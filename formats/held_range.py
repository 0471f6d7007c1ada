"""A small range of a file that is read once, so that the many headers in it cost no system call each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from formats.input_file import InputFile
from formats.partial_files import Span

_MOST_BYTES = 64 << 10
"""The size of the largest range that is held. A small tensor in an archive of its own fits in."""


class Ranges(Protocol):
    """A file whose small ranges are read by position."""

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int: ...

    @property
    def is_partial(self) -> bool: ...

    def read(self, offset: int, count: int) -> bytes:
        """The `count` bytes from offset on. Raises CorruptCheckpoint if the file is shorter."""
        ...

    def expect(self, spans: Sequence[Span]) -> None:
        """Announce small ranges that will be read one by one."""
        ...


def held(file: InputFile, start: int, nbytes: int) -> Ranges:
    """The file, with this range in memory if it is small. A stand-in of a remote object holds what it fetches itself."""
    if nbytes > _MOST_BYTES or file.is_partial:
        return file
    return _HeldRange(file, start, file.read(start, nbytes))


class _HeldRange:
    is_partial = False

    def __init__(self, file: InputFile, start: int, content: bytes) -> None:
        self.path, self.size = file.path, file.size
        self._file, self._start, self._content = file, start, content

    def read(self, offset: int, count: int) -> bytes:
        first = offset - self._start
        if first < 0 or count < 0 or first + count > len(self._content):
            return self._file.read(offset, count)
        return self._content[first : first + count]

    def expect(self, spans: Sequence[Span]) -> None:
        """Do nothing: the range is read already."""
