"""Compares the CRC-32 of a zip entry after all of the entry has been read, in any order and by any number of threads.

Torch stores a CRC-32 with every storage and never checks it. Most readers of checkpoints read whole storages, but in
blocks and out of order. The CRCs of neighbouring ranges can be combined to the CRC of both.
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
"""One lock for all entries: a model has tens of thousands of entries, and joining two ranges takes a microsecond."""


class Readable(Protocol):
    """A file that contains zip entries."""

    def read_into(self, offset: int, out: Bytes) -> None: ...


class Entry(NamedTuple):
    """A zip entry, and the expected checksum of its bytes."""

    path: str
    start: int
    """Offset of the entry in the file."""
    size: int
    crc: int


class EntryCheck:
    """The check of one entry. Ranges that overlap other ranges are not counted, so such an entry may never count as
    read completely."""

    __slots__ = ("_begun", "_crc", "_done", "_path", "_size", "_spans", "_start", "_touched")

    def __init__(self, path: Path, start: int, size: int, crc: int, begun: set[Entry]) -> None:
        """start: offset of the entry in the file. begun: the set that holds the entry while it has been read partly and
        not yet checked."""
        self._begun = begun
        self._path, self._start, self._size, self._crc = path, start, size, crc
        self._done = self._touched = False
        self._spans: list[tuple[int, int, int]] = []
        """(first byte, end, CRC) of each range that was read, in order. No two ranges touch each other."""

    def add(self, start: int, data: Bytes) -> None:
        """Record that contiguous bytes of the file were read, from `start` on.

        Raises CorruptCheckpoint if the entry is now complete and its checksum is wrong.
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
        """True if the whole entry was read, and its checksum was right."""
        return self._done

    @property
    def entry(self) -> Entry:
        return Entry(str(self._path), self._start, self._size, self._crc)

    def touch(self) -> None:
        """Record that bytes were read that are too scattered to be added one by one."""
        if not (self._touched or self._done):
            self._touched = True
            self._begun.add(self.entry)

    def finish(self, file: Readable) -> None:
        """Read the rest of an entry that was read partly, such as the padding of a vocabulary. Raises as add() does."""
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
            last += 1  # this range was read before, and now again as part of a larger one
        del spans[first:last]
        before = spans[first - 1] if first else (0, 0, 0)
        after = spans[first] if first < len(spans) else (end + 1, 0, 0)
        # A range that overlaps another range is not counted: its CRC could not be combined.
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
