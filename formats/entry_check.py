"""The CRC-32 of a zip entry, compared when all of the entry has been read: by how many threads and in which pieces doesn't matter.

Torch stores a CRC-32 with every storage and never looks at it again. Most of what reads a checkpoint reads storages whole,
though in blocks and out of order; the CRCs of neighbouring stretches combine to that of both.
"""

from bisect import bisect_left
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol

from isal.isal_zlib import crc32, crc32_combine

from formats.errors import CorruptCheckpoint
from formats.lazy_numpy import Bytes, np

_BLOCK_BYTES = 2 << 20
_JOINING = Lock()
"""One for all entries: a model has tens of thousands of them, and joining two stretches takes a microsecond."""


class Readable(Protocol):
    """The file that an entry lies in."""

    def read_into(self, offset: int, out: Bytes) -> None: ...


class Entry(NamedTuple):
    """A zip entry, and the checksum that its bytes should have."""

    path: str
    start: int
    """In the file."""
    size: int
    crc: int


class EntryCheck:
    """Of one entry. Stretches that overlap others are left out: then the entry may never count as read whole."""

    __slots__ = ("_begun", "_crc", "_done", "_path", "_size", "_spans", "_start", "_touched")

    def __init__(self, path: Path, start: int, size: int, crc: int, begun: set[Entry]) -> None:
        """start: in the file. begun: where the entry is as long as something was read of it, and its checksum not compared."""
        self._begun = begun
        self._path, self._start, self._size, self._crc = path, start, size, crc
        self._done = self._touched = False
        self._spans: list[tuple[int, int, int]] = []
        """(first byte, end, CRC) of what was read, in order; no two touch each other."""

    def add(self, start: int, data: Bytes) -> None:
        """Bytes of the file from start on were read, contiguously.

        Raises CorruptCheckpoint when the last ones show that the entry isn't what was stored.
        """
        if self._done:
            return
        crc, start = crc32(data), start - self._start
        with _JOINING:
            if self._done:
                return
            self._join(start, start + data.nbytes, crc)
            if self._spans[0][:2] != (0, self._size):
                self._begun.add(self.entry)
                return
            self._done = True
            if self._spans.pop()[2] != self._crc:
                raise CorruptCheckpoint(
                    f"{self._path}: the checksum of the tensor at byte {self._start} is wrong: it was damaged since it was "
                    "saved; copy the file again"
                )
            self._begun.discard(self.entry)

    @property
    def compared(self) -> bool:
        """Whether all of it was read, and its checksum was right."""
        return self._done

    @property
    def entry(self) -> Entry:
        return Entry(str(self._path), self._start, self._size, self._crc)

    def touch(self) -> None:
        """Bytes were read that lie too scattered to be added one by one."""
        if not (self._touched or self._done):
            self._touched = True
            self._begun.add(self.entry)

    def finish(self, file: Readable) -> None:
        """Read what nobody needed of an entry that something was read of, as the padding of a vocabulary. Raises as add()."""
        if self._done or not (self._spans or self._touched):
            return
        edges = [0, *(edge for start, end, _ in self._spans for edge in (start, end)), self._size]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            for first in range(start, end, _BLOCK_BYTES):
                block = np.empty(min(_BLOCK_BYTES, end - first), np.uint8)
                file.read_into(self._start + first, block)
                self.add(self._start + first, block)

    def _join(self, start: int, end: int, crc: int) -> None:
        spans = self._spans
        first = bisect_left(spans, (start,))
        last = first
        while last < len(spans) and spans[last][1] <= end:
            last += 1  # read before, and now again as a part of more
        del spans[first:last]
        before = spans[first - 1] if first else (0, 0, 0)
        after = spans[first] if first < len(spans) else (end + 1, 0, 0)
        if before[1] > start or after[0] < end:
            return
        if first and before[1] == start:
            start, crc = before[0], crc32_combine(before[2], crc, end - start)
            first -= 1
            del spans[first]
        if after[0] == end:
            end, crc = after[1], crc32_combine(crc, after[2], after[1] - end)
            del spans[first]
        spans.insert(first, (start, end, crc))
