"""A file of an output in a store that grows at its end, and whose size is known only at the end.

Complete parts are sent at once. The bytes behind them, less than a part, wait in memory. Before a journal entry they are
stored beside the journal, so that a run that resumes has all bytes that the journal describes.
"""

from collections.abc import Callable

from formats.errors import CorruptCheckpoint
from formats.stores.part_file import PartFile
from formats.stores.store_journal import StoreJournal

_TAILS = 2
"""Tails that stay stored: the last journal entry describes one of them if the run is killed between tail and entry."""


class GrowingPartFile:
    """It has the interface of `formats.target.GrowingFile`. One thread writes."""

    def __init__(self, file: PartFile, journal: StoreJournal, wait: Callable[[], None]) -> None:
        """file: planned with the largest possible size. wait: waits until all parts were sent, and raises their error."""
        self._file, self._journal, self._wait = file, journal, wait
        self._sent = 0
        self._tail = bytearray()
        self._stored: list[int] = []

    @property
    def size(self) -> int:
        return self._sent + len(self._tail)

    def resume(self, size: int) -> bool:
        done = self._file.done
        if done is not None:
            self._sent = done.size
            return done.size == size
        count, rest = divmod(size, self._file.part_bytes)
        tail = self._journal.tail(size) if size else b""
        has_parts = all(number in self._file.parts for number in range(1, count + 1))
        if tail is None or len(tail) != rest or not has_parts:
            self._file.keep(0)
            return size == 0
        self._file.keep(count)
        self._sent, self._tail = size - rest, bytearray(tail)
        self._stored = [size]
        return True

    def write(self, data: bytes) -> None:
        if self._file.done is not None:
            raise CorruptCheckpoint(
                f"{self._file.key}: an earlier run has completed it with other content; run again without --resume"
            )
        self._tail += data
        while len(self._tail) >= self._file.part_bytes:
            part = bytes(self._tail[: self._file.part_bytes])
            del self._tail[: self._file.part_bytes]
            self._file.write(self._sent, part)
            self._sent += len(part)

    def sync(self) -> None:
        if self._file.done is not None or self.size in self._stored:
            return
        self._wait()
        self._journal.put_tail(self.size, bytes(self._tail))
        self._stored.append(self.size)
        while len(self._stored) > _TAILS:
            self._journal.forget_tail(self._stored.pop(0))

    def finish(self) -> None:
        self._file.end_at(self.size)
        if self._tail:
            self._file.write(self._sent, bytes(self._tail))

    def close(self) -> None:
        """Nothing to do."""
