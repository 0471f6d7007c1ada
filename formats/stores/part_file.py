"""A file of an output in a store: bytes at any position become parts, and a complete part is sent at once.

`PartFile` has the interface of `formats.staged_file.StagedFile`. A part is complete when all of its bytes are written that
are neither a gap nor written before. Parts that the store has from an earlier run are not sent again.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from formats.errors import CheckpointError
from formats.output import Piece
from formats.partial_files import Span
from formats.stores.part_sizes import bytes_in, part_bytes
from formats.stores.slots import Slot, Slots
from formats.stores.waiting import CONNECTIONS
from formats.stores.writing import Held, Upload, WritableStore, joined_tag
from formats.tensor import Bytes


class Sender:
    """Sends parts with a pool of threads. The first error ends all writers."""

    def __init__(self, store: WritableStore, slots: Slots, connections: int = CONNECTIONS) -> None:
        self.store, self.slots = store, slots
        self._pool = ThreadPoolExecutor(connections, "sender")
        self._running: set[Future[None]] = set()
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def submit(self, task: Callable[[], None]) -> None:
        with self._lock:
            future = self._pool.submit(self._run, task)
            self._running.add(future)
        future.add_done_callback(self._ended)

    def _run(self, task: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            task()
        except BaseException as error:
            self.error = self.error or error
            self.slots.fail(error)

    def _ended(self, future: Future[None]) -> None:
        with self._lock:
            self._running.discard(future)

    def wait(self) -> None:
        """Wait until everything was sent. Raises the first error."""
        while True:
            with self._lock:
                running = list(self._running)
            if not running:
                break
            for future in running:
                future.result()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Wait for the requests that are under way, and send nothing more."""
        self.error = self.error or CheckpointError("the run has ended")
        self.slots.fail(self.error)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.slots.close()


class _Part:
    """A part that isn't complete yet."""

    def __init__(self, slot: Slot, missing: int) -> None:
        self.slot, self.missing = slot, missing


class PartFile:
    """A file of known size. Any thread may write at any position."""

    def __init__(
        self,
        sender: Sender,
        key: str,
        size: int,
        gaps: Sequence[Span] = (),
        known: Sequence[Piece] = (),
        upload: Upload | None = None,
        parts: dict[int, Held] | None = None,
    ) -> None:
        """gaps: the ranges that nobody writes, in order. known: ranges whose bytes are known already, in order.

        upload, parts: what the store has from an earlier run.
        """
        self.key, self.size = key, size
        self.upload = upload
        self.parts: dict[int, Held] = dict(parts or {})
        """The parts that the store has."""
        self.done: Held | None = None
        """The state of the complete object, if an earlier run has completed it."""
        self._sender, self._gaps, self._known = sender, gaps, known
        self._known_at = [piece.offset for piece in known]
        self.part_bytes = part_bytes(size)
        self._open: dict[int, _Part] = {}
        self._sent = set(self.parts)
        """Numbers of the parts that are complete: the store has them, or will."""
        self._lock, self._making, self._beginning = (threading.Lock() for _ in range(3))

    def write(self, offset: int, data: Bytes | bytes) -> None:
        """Write contiguous bytes at their offset. Waits while too many parts wait. Raises the error of any part."""
        if self._sender.error is not None:
            raise self._sender.error
        if self.done is not None:
            return
        view = memoryview(data) if isinstance(data, bytes) else data.data.cast("B")
        while view:
            number = offset // self.part_bytes + 1
            at = offset - (number - 1) * self.part_bytes
            piece = view[: self.part_bytes - at]
            self._put(number, at, piece)
            view, offset = view[len(piece) :], offset + len(piece)

    def _put(self, number: int, at: int, piece: memoryview) -> None:
        part = self._part(number)
        if part is None:
            return
        part.slot.put(at, piece)
        with self._lock:
            part.missing -= len(piece)
            missing = part.missing
        if missing < 0:
            raise CheckpointError(
                f"{self.key}: part {number} was written twice; please report this",
                code="internal-error",
            )
        if not missing:
            self._send(number, part)

    def _part(self, number: int) -> _Part | None:
        """The part with this number; None if it is complete already."""
        found, is_sent = self._known_part(number)
        if found is not None or is_sent:
            return found
        # One thread at a time: a second one would wait for a place that the part doesn't need.
        with self._making:
            found, is_sent = self._known_part(number)
            if found is not None or is_sent:
                return found
            start, end = self._span(number)
            slot = self._sender.slots.take(end - start)
            known = self._put_known(slot, start, end)
            made = _Part(slot, end - start - bytes_in(self._gaps, start, end) - known)
            with self._lock:
                self._open[number] = made
            return made

    def _known_part(self, number: int) -> tuple[_Part | None, bool]:
        """(the part if it is open, True if it is complete)."""
        with self._lock:
            return self._open.get(number), number in self._sent

    def _put_known(self, slot: Slot, start: int, end: int) -> int:
        """Write the known bytes of a part. Returns their number."""
        count = 0
        first = max(0, bisect_right(self._known_at, start) - 1)
        for piece in self._known[first : bisect_left(self._known_at, end)]:
            begin, stop = max(start, piece.offset), min(end, piece.offset + piece.nbytes)
            if begin < stop:
                content = memoryview(piece.content({}))
                slot.put(begin - start, content[begin - piece.offset : stop - piece.offset])
                count += stop - begin
        return count

    def _span(self, number: int) -> Span:
        start = (number - 1) * self.part_bytes
        return start, min(start + self.part_bytes, self.size)

    def _send(self, number: int, part: _Part) -> None:
        with self._lock:
            del self._open[number]
            self._sent.add(number)

        def send() -> None:
            content = part.slot.content()
            crc = self._sender.store.checksum.of(content)
            tag = self._sender.store.put_part(self.begun(), number, content, crc)
            with self._lock:
                self.parts[number] = Held(len(content), tag, crc)
            part.slot.free()

        self._sender.submit(send)

    def begun(self) -> Upload:
        """The upload of this file, which begins with the first part."""
        with self._beginning:
            if self.upload is None:
                identity = self._sender.store.begin_upload(self.key)
                self.upload = Upload(self.key, identity, 0.0)
            return self.upload

    def keep(self, count: int) -> None:
        """Forget the parts of an earlier run behind the first `count` ones. They are sent again."""
        self.parts = {number: part for number, part in self.parts.items() if number <= count}
        self._sent = set(self.parts)

    def end_at(self, size: int) -> None:
        """Make the file shorter than it was planned. Nothing may have been written behind its last complete part."""
        self.size = size

    def holds(self, start: int, end: int) -> bool:
        """True if the store has all parts of a range."""
        first, last = start // self.part_bytes + 1, max(start, end - 1) // self.part_bytes + 1
        with self._lock:
            return self.done is not None or all(
                number in self.parts for number in range(first, last + 1)
            )

    def sync(self) -> None:
        """Nothing to do: `holds` tells what the store has."""

    def sums(self) -> dict[str, int]:
        """The checksums of the parts that the store has, by their ETags."""
        with self._lock:
            return {part.tag: part.crc for part in self.parts.values() if part.crc is not None}

    def finish(self) -> None:
        """Send the parts that are incomplete: what is missing in them stays zero. Part 1 is sent in any case."""
        with self._lock:
            rest = list(self._open.items())
            count = max(1, -(-self.size // self.part_bytes))
            missing = set(range(1, count + 1)) - self._sent - set(self._open)
        for number, part in rest:
            self._send(number, part)
        for number in sorted(missing):
            start, end = self._span(number)
            part = _Part(self._sender.slots.take(end - start), 0)
            self._put_known(part.slot, start, end)
            with self._lock:
                self._open[number] = part
            self._send(number, part)

    def whole(self) -> Held:
        """The expected state of the object. All parts have to be sent."""
        crc: int | None = 0
        for number in sorted(self.parts):
            part = self.parts[number]
            if crc is None or part.crc is None:
                crc = None
                break
            crc = self._sender.store.checksum.joined(crc, part.crc, part.size)
        return Held(self.size, joined_tag(self.parts), crc)

    def close(self) -> None:
        """Give the places of incomplete parts back."""
        with self._lock:
            left, self._open = self._open, {}
        for part in left.values():
            part.slot.free()


class SmallFile:
    """A small file, in memory until the output is published."""

    def __init__(self, key: str, size: int) -> None:
        self.key, self._content = key, bytearray(size)

    @property
    def content(self) -> bytes:
        return bytes(self._content)

    def write(self, offset: int, data: Bytes | bytes) -> None:
        view = memoryview(data) if isinstance(data, bytes) else data.data.cast("B")
        self._content[offset : offset + len(view)] = view

    def holds(self, start: int, end: int) -> bool:
        """True: whoever resumes makes small files again."""
        return True

    def sync(self) -> None:
        """Nothing to do: the file is written last."""

    def close(self) -> None:
        """Nothing to do."""
