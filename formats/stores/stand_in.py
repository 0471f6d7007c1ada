"""The stand-in of one object: a sparse local file of its size, whose bytes are fetched when they are read."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from formats.errors import CorruptCheckpoint, NotEnoughSpace
from formats.partial_files import RemoteState, Span, register
from formats.stores.objects import Objects
from formats.stores.patience import Patience, Transient
from formats.stores.small_ranges import SmallRanges
from formats.stores.windows import PAGE, WINDOW, Windows


class StandIn:
    """An object as a file (formats.partial_files.PartialFile)."""

    def __init__(
        self,
        path: Path,
        objects: Objects,
        key: str,
        state: RemoteState,
        neighbours: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the sparse file, which must not exist.

        key: the object's name for `objects`. neighbours: called before the whole object is put into the file; it may do
        the same for objects like this one.
        """
        self.origin, self.state = objects, state
        self._path, self._key, self._neighbours = path, key, neighbours
        self._windows = Windows(state.size, self._fill)
        self._small = SmallRanges(state.size, self._fill)
        self._lock = Lock()
        self._held: list[Span] = []
        """Ranges whose bytes are in the local file: sorted, with gaps between them."""
        try:
            with path.open("xb") as file:
                file.truncate(state.size)
        except (OSError, OverflowError) as error:
            raise CorruptCheckpoint(
                f"{state.uri}: no file of {state.size:,} bytes can be made in {path.parent}: {error}"
            ) from error
        register(path, self)

    def give(self, start: int, content: bytes) -> None:
        """Keep bytes in memory that are known already."""
        self._small.give(start, content)

    def read_into(self, offset: int, out: memoryview, tensor: Span | None) -> None:
        self._windows.read_into(offset, out, tensor)

    def announce(self, tensor: Span) -> None:
        self._windows.announce(tensor)

    def abandon(self) -> None:
        self._windows.abandon()

    def read(self, offset: int, count: int) -> bytes:
        if not count:
            return b""
        held = self._windows.held(offset, offset + count)
        if held is None:
            held = self._small.held(offset, count)
        if held is not None:
            return held
        if self.state.size > PAGE:
            return self._small.read(offset, count)
        # A small object takes one request in all, also if its tensors are read later.
        content = bytearray(count)
        self._windows.read_into(offset, memoryview(content), None)
        return bytes(content)

    def expect(self, spans: Sequence[Span]) -> None:
        self._small.expect(spans)

    def require(self, start: int, end: int) -> None:
        if (start, end) == (0, self.state.size) and not self._held:
            self._neighbours()
        self.hold(start, end)

    def hold(self, start: int, end: int) -> None:
        """Put the bytes of a range into the local file."""
        with self._lock:
            for first, last in self._gaps(start, min(end, self.state.size)):
                for begin in range(first, last, WINDOW):
                    self._write(begin, min(begin + WINDOW, last))
                self._note(first, last)

    def _write(self, start: int, end: int) -> None:
        content = self._windows.held(start, end)
        if content is None:
            buffer = bytearray(end - start)
            self._fill(start, memoryview(buffer))
            content = bytes(buffer)
        try:
            with self._path.open("r+b") as file:
                file.seek(start)
                file.write(content)
        except OSError as error:
            raise NotEnoughSpace(
                f"{self.state.uri}: can't be copied to {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a larger disk"
            ) from error

    def _gaps(self, start: int, end: int) -> list[Span]:
        gaps = []
        for begin, stop in self._held:
            if begin > start and start < end:
                gaps.append((start, min(begin, end)))
            start = max(start, stop)
        return [*gaps, (start, end)] if start < end else gaps

    def _note(self, start: int, end: int) -> None:
        merged: list[Span] = []
        for begin, stop in sorted([*self._held, (start, end)]):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((begin, stop))
        self._held = merged

    def _fill(self, start: int, out: memoryview) -> None:
        fetch(self.origin, self._key, self.state, start, out)


def fetch(origin: Objects, key: str, state: RemoteState, start: int, out: memoryview) -> None:
    """Fill a buffer with an object's bytes from `start` on. After a failure the rest is asked for again, from the byte that
    was reached.

    Raises CheckpointError after several attempts, and if the object isn't the one of `state` any more.
    """
    patience, done = Patience(origin.request(key)), 0
    while done < len(out):
        try:
            for count in origin.fetch(key, state, start + done, out[done:]):
                done += count
                patience.progress()
        except Transient as failure:
            patience.wait(failure)
