"""Small ranges of an object in memory: headers, directories, pickles.

A read fetches 32 KiB, and twice as much each time that reads continue. Readers of headers therefore need few requests,
although they read some bytes at a time.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from formats.partial_files import Span
from formats.stores.windows import Fill

_FIRST_BYTES = 32 << 10
_MOST_BYTES = 4 << 20
_LAST_BYTES = 64 << 10
"""Bytes that are fetched for a first read near the end: the directory of a zip archive."""
_HELD_BYTES = 16 << 20
"""Most bytes that one object holds."""
_GAP = 64 << 10
"""Ranges that are no farther apart are fetched by one request."""
_THREADS = 16


class SmallRanges:
    """The small ranges of one object. Any thread may read."""

    def __init__(self, size: int, fill: Fill) -> None:
        self._size, self._fill, self._lock = size, fill, Lock()
        self._starts: list[int] = []
        self._blocks: dict[int, bytes] = {}
        self._next = _FIRST_BYTES
        self._last_end = -1
        self._nbytes = 0

    def read(self, offset: int, count: int) -> bytes:
        """The bytes from offset on. The range lies inside the object."""
        with self._lock:
            found = self._find(offset, offset + count)
            if found is not None:
                return found
            start, end = self._fetched(offset, offset + count)
            content = self._fetch(start, end)
            if len(content) <= _MOST_BYTES:
                self._hold(start, content)
            return content[offset - start : offset - start + count]

    def held(self, offset: int, count: int) -> bytes | None:
        """The bytes from offset on if they are in memory."""
        with self._lock:
            return self._find(offset, offset + count)

    def give(self, start: int, content: bytes) -> None:
        """Hold bytes that are known already."""
        with self._lock:
            self._hold(start, content)

    def expect(self, spans: Sequence[Span]) -> None:
        """Fetch ranges that will be read, several at the same time."""
        with self._lock:
            missing = [span for span in sorted(spans) if self._find(*span) is None]
            joined = _joined(missing)
            if len(joined) < 2:
                return
            with ThreadPoolExecutor(min(_THREADS, len(joined))) as pool:
                contents = list(pool.map(lambda span: self._fetch(*span), joined))
            for span, content in zip(joined, contents, strict=True):
                self._hold_parts(span, content, missing)

    def _hold_parts(self, fetched: Span, content: bytes, wanted: Sequence[Span]) -> None:
        """Hold the wanted ranges of a fetched one, without the gaps between them."""
        start, end = fetched
        for first, last in wanted:
            if start <= first and last <= end:
                self._hold(first, content[first - start : last - start])

    def _find(self, start: int, end: int) -> bytes | None:
        place = bisect_right(self._starts, start) - 1
        if place < 0:
            return None
        first = self._starts[place]
        block = self._blocks[first]
        return block[start - first : end - first] if end <= first + len(block) else None

    def _fetched(self, start: int, end: int) -> Span:
        """The range to fetch for a read."""
        follows = self._last_end <= start <= self._last_end + self._next
        self._next = min(2 * self._next, _MOST_BYTES) if follows else _FIRST_BYTES
        if not self._starts and start > max(0, self._size - _LAST_BYTES):
            return max(0, self._size - _LAST_BYTES), self._size
        return start, min(self._size, max(end, start + self._next))

    def _fetch(self, start: int, end: int) -> bytes:
        content = bytearray(end - start)
        self._fill(start, memoryview(content))
        return bytes(content)

    def _hold(self, start: int, content: bytes) -> None:
        self._last_end = start + len(content)
        if self._nbytes + len(content) > _HELD_BYTES:
            self._starts.clear()
            self._blocks.clear()
            self._nbytes = 0
        former = self._blocks.get(start)
        if former is None:
            insort(self._starts, start)
        if former is None or len(former) < len(content):
            self._blocks[start] = content
            self._nbytes += len(content) - len(former or b"")


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Sorted ranges, with neighbours joined."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and start <= joined[-1][1] + _GAP:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined
