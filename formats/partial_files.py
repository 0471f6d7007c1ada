"""Local sparse files that stand for remote files. They have the same size and some of the bytes; others are fetched on
demand.

`InputFile` asks this module before it reads, so that it never reads the holes of such a file as zeros. The creator of a
PartialFile decides where the bytes come from.
"""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

Fetch = Callable[[int, int], bytes]
"""A function that returns exactly the bytes from `start` up to `end`. Raises CheckpointError."""


class PartialFile:
    """A sparse file of `size` bytes at `path`, which must not exist. Any thread may use it."""

    def __init__(self, path: Path, size: int, fetch: Fetch) -> None:
        self._path, self._fetch, self._lock = path, fetch, Lock()
        self._held: list[tuple[int, int]] = []
        """Ranges whose bytes are present: half open, sorted, with gaps between them."""
        with path.open("xb") as file:
            file.truncate(size)
        _partial[os.fspath(path)] = self

    def hold(self, start: int, content: bytes) -> None:
        """Store bytes that are known already."""
        with self._lock:
            self._write(start, content)

    def require(self, start: int, end: int) -> None:
        """Fetch the missing bytes of a range. Raises what `fetch` raises."""
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
"""Path -> partial file, until the process ends: tensors may be read as long as somebody holds them."""


def find(path: Path) -> PartialFile | None:
    """The partial file at a path; None for a complete file."""
    return _partial.get(os.fspath(path))
