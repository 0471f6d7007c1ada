"""A file on a disk that grows at its end, and whose size is known only at the end."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from formats.errors import CheckpointError


class GrowingDiskFile:
    """It has the interface of `formats.target.GrowingFile`. One thread writes."""

    def __init__(self, path: Path, explain: Callable[[OSError, Path], CheckpointError]) -> None:
        """explain: makes the error for a call that failed on a file."""
        self._path, self._explain = path, explain
        self._file: BinaryIO | None = None
        self.size = 0

    def resume(self, size: int) -> bool:
        """Keep the first `size` bytes, and drop the rest. False, and an empty file, if it has fewer."""
        with self._explained():
            is_there = self._path.is_file() and self._path.stat().st_size >= size
            self.size = size if is_there else 0
            # Without a buffer: each block is larger than one, and no bytes are left for close() to write.
            self._file = self._path.open("r+b" if self.size else "wb", buffering=0)
            self._file.truncate(self.size)
            self._file.seek(self.size)
        return self.size == size

    def write(self, data: bytes) -> None:
        """Append bytes."""
        assert self._file is not None
        view = memoryview(data)
        with self._explained():
            while view:
                count = self._file.write(view)
                view = view[count:]
        self.size += len(data)

    def sync(self) -> None:
        """Bring everything to the disk."""
        assert self._file is not None
        with self._explained():
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Bring everything to the disk. Nothing is written after this call."""
        self.sync()

    def close(self) -> None:
        """Close the file. It may be called again."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._explain(error, self._path) from error
