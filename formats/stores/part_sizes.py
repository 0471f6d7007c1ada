"""The parts of an upload: their size, and the bytes of a file that nobody writes.

S3 allows 10,000 parts of an object, each of 5 MiB to 5 GiB; the last one may be smaller.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from formats.partial_files import Span

PART_BYTES = 8 << 20
"""Size of the parts of an object of up to 78 GiB."""
MOST_PARTS = 10_000
_MEBIBYTE = 1 << 20


def part_bytes(size: int) -> int:
    """The size of the parts of an object of `size` bytes: a multiple of 1 MiB for large objects."""
    if size <= PART_BYTES * MOST_PARTS:
        return PART_BYTES
    return -(-size // (MOST_PARTS * _MEBIBYTE)) * _MEBIBYTE


def part_count(size: int) -> int:
    return max(1, -(-size // part_bytes(size)))


def gaps(size: int, written: Iterable[Span]) -> list[Span]:
    """The ranges of a file outside of `written`, in order. They stay zero."""
    found: list[Span] = []
    position = 0
    for start, end in sorted(written):
        if start > position:
            found.append((position, start))
        position = max(position, end)
    if position < size:
        found.append((position, size))
    return found


def bytes_in(spans: Sequence[Span], start: int, end: int) -> int:
    """The number of bytes that sorted spans without overlaps have in a range."""
    count = 0
    first = max(0, bisect_right(spans, (start, start)) - 1)
    for number in range(first, len(spans)):
        begin, stop = spans[number]
        if begin >= end:
            break
        count += max(0, min(stop, end) - max(begin, start))
    return count
