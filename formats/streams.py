"""Files as Python's file objects, for code that reads forward or seeks. A stand-in of a remote object fetches what is
read.
"""

import io
import os
from pathlib import Path
from typing import IO, BinaryIO, cast

from formats.ceilings import DIRECTORY_BYTES
from formats.held_range import Ranges
from formats.regular_files import open_regular
from formats.tensor import Bytes, InputFile

_BUFFER_BYTES = 64 << 10


class _Range(io.RawIOBase):
    """A range of a file. One read gets at most the bytes of an archive's directory."""

    def __init__(self, file: Ranges, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._position = file, start, nbytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = (
            offset
            + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        )
        if self._position < 0:
            raise ValueError("a place before the start of the archive")
        return self._position

    def read(self, size: int = -1, /) -> bytes | None:
        if min(size, self._nbytes - self._position) > DIRECTORY_BYTES:
            raise ValueError(f"{size:,} bytes where an archive has at most {DIRECTORY_BYTES:,}")
        return super().read(size)

    def readinto(self, out: Bytes) -> int:  # type: ignore[override]
        count = min(len(out), self._nbytes - self._position)
        if count <= 0:
            return 0
        out[:count] = self._file.read(self._start + self._position, count)
        self._position += count
        return count


def range_of(file: Ranges, start: int, nbytes: int) -> IO[bytes]:
    """A range of a file as a file of its own."""
    return cast(IO[bytes], _Range(file, start, nbytes))


def open_stream(path: Path) -> BinaryIO:
    """A regular file, to be read from its start. Raises CorruptCheckpoint for anything else."""
    file = InputFile.open(path)
    if file.is_partial:
        return io.BufferedReader(cast(io.RawIOBase, _Range(file, 0, file.size)), _BUFFER_BYTES)
    return os.fdopen(open_regular(path), "rb")
