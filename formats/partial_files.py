"""Local files that stand for remote ones: as large as these, with some of their bytes; others are fetched when they are read.

`InputFile` asks here before it reads, so that nobody takes the holes of such a file for zeros. Where the bytes come from is
the business of whoever makes one.
"""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

Fetch = Callable[[int, int], bytes]
"""The bytes from `start` up to `end`, exactly. Raises CheckpointError."""


class PartialFile:
    """A sparse file of `size` bytes at `path`, which must not exist. May be used from any thread."""

    def __init__(self, path: Path, size: int, fetch: Fetch) -> None:
        self._path, self._fetch, self._lock = path, fetch, Lock()
        self._held: list[tuple[int, int]] = []
        """Ranges that are there, half open, in order, with gaps between them."""
        with path.open("xb") as file:
            file.truncate(size)
        _partial[os.fspath(path)] = self

    def hold(self, start: int, content: bytes) -> None:
        """Take bytes that are known already."""
        with self._lock:
            self._write(start, content)

    def require(self, start: int, end: int) -> None:
        """Fetch what is missing of a range. Raises what `fetch` does."""
        with self._lock:
            for begin, stop in self._gaps(start, end):
                self._write(begin, self._fetch(begin, stop))

    def _gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        gaps = []
        for begin, stop in self._held:
            if begin > start and start < end:
                gaps.append((start, min(begin, end)))
            start = max(start, stop)
        return [*gaps, (start, end)] if start < end else gaps

    def _write(self, start: int, content: bytes) -> None:
        with self._path.open("r+b") as file:
            file.seek(start)
            file.write(content)
        merged: list[tuple[int, int]] = []
        for begin, stop in sorted([*self._held, (start, start + len(content))]):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((begin, stop))
        self._held = merged


_partial: dict[str, PartialFile] = {}
"""By path, until the process ends: tensors may be read for as long as somebody has them."""


def find(path: Path) -> PartialFile | None:
    """None for a file that is complete."""
    return _partial.get(os.fspath(path))
