"""The windows of an object: ranges of up to 8 MiB that wait in memory until the tensors in them have been read.

    first read of a tensor      one aligned window of 8 MiB, which neighbouring tensors share
    reads that follow on        the next windows, fetched ahead by threads of their own
    tensors that come next      their windows, in the order of the tensors, while memory has room
    a read somewhere else       only the pages of 1 MiB that it touches: the rest may belong to another shard

All objects of a process share one budget. Windows that were read leave first.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from formats.partial_files import Span
from formats.stores import buffers
from formats.stores.announced import Announced

PAGE = 1 << 20
WINDOW = 8 << 20
BUDGET = 184 << 20
"""Most bytes of windows in memory. Each thread that waits for its own window may exceed it by this window."""
AHEAD = 4
"""Most windows that are fetched ahead of one reader."""
CONNECTIONS = 16
"""Threads that fetch ahead."""
KEPT_FREE = WINDOW
"""The part of the budget that tensors which come next leave to readers that wait."""

Fill = Callable[[int, memoryview], None]
"""A function that fills a buffer with an object's bytes from an offset on."""


class _Window:
    """A range of an object that is being fetched, or has been fetched."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.content = buffers.take(end - start)
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.unread = end - start
        """Bytes that nobody has read yet, if no byte is read twice."""

    def __del__(self) -> None:
        # Not when the register drops the window: readers may still copy from it.
        buffers.give_back(self.content)


class _Reader:
    """The last read of a tensor by one thread: where it ended, and the length of the run of reads that it continues."""

    __slots__ = ("end", "entered", "pages", "window")

    def __init__(self, end: int, pages: int) -> None:
        self.end, self.pages = end, pages
        self.entered = 0
        """Number of windows that this run of reads has entered."""
        self.window = -1
        """Number of the last of them in the object."""


class Windows:
    """The windows of one object. Any thread may read."""

    def __init__(self, size: int, fill: Fill) -> None:
        self._size, self._fill = size, fill
        self._pages: dict[int, _Window] = {}
        self._readers: dict[tuple[int, Span | None], _Reader] = {}

    def read_into(self, offset: int, out: memoryview, tensor: Span | None) -> None:
        """Fill a buffer. tensor: the range of the tensor that is read, for fetching ahead."""
        reader = self._reader(offset, tensor)
        position, end = offset, offset + len(out)
        while position < end:
            window = self._window_at(position, end, reader.pages)
            stop = min(end, window.end)
            first = position - window.start
            out[position - offset : stop - offset] = memoryview(window.content)[
                first : first + stop - position
            ]
            window.unread -= stop - position
            position = stop
            self._go_on(tensor, window)
        reader.end = end
        if tensor is not None and end >= tensor[1]:
            self._readers.pop((threading.get_ident(), tensor), None)
        elif tensor is not None and reader.pages * PAGE >= WINDOW:
            self._fetch_ahead(end, tensor[1], reader)

    def _go_on(self, tensor: Span | None, window: _Window) -> None:
        """Have announced windows fetched, if a window that was read makes room for them."""
        with _LOCK:
            announced = _SHARED.announced
            if tensor is not None:
                announced.note(self, tensor, window.end)
            if window.unread <= 0:
                announced.fetch()

    def announce(self, tensor: Span) -> None:
        """Have the windows of a tensor fetched, after those that were announced before."""
        with _LOCK:
            _SHARED.announced.add(self, tensor)
            _SHARED.announced.fetch()

    def abandon(self) -> None:
        """Give up what is fetched ahead: it would take the memory of other objects, and nobody reads it."""
        with _LOCK:
            _SHARED.abandon(self)

    def fetch_from(self, position: int) -> int | None:
        """See `Owner`. The caller has locked the register."""
        window = self._pages.get(position // PAGE)
        if window is None:
            if not _SHARED.has_room(WINDOW + KEPT_FREE):
                return None
            window = self._new_window(position // PAGE * PAGE, position, WINDOW // PAGE)
            _PREFETCH.put(partial(self._fetch, window))
        return window.end

    def held(self, start: int, end: int) -> bytes | None:
        """The bytes of a range if one window in memory has them all."""
        with _LOCK:
            window = self._pages.get(start // PAGE)
        if window is None or not window.ready.is_set() or window.error or window.end < end:
            return None
        return bytes(window.content[start - window.start : end - window.start])

    def _reader(self, offset: int, tensor: Span | None) -> _Reader:
        """The reader of this tensor in this thread, with the number of pages to fetch at once."""
        where = threading.get_ident(), tensor
        reader = self._readers.get(where)
        if reader is not None and reader.end == offset:
            reader.pages = min(2 * reader.pages, WINDOW // PAGE)
            return reader
        is_start = tensor is not None and tensor[0] == offset
        reader = self._readers[where] = _Reader(offset, WINDOW // PAGE if is_start else 1)
        return reader

    def _window_at(self, position: int, end: int, pages: int) -> _Window:
        """The window with a byte. Fetches it, up to `end` at least, unless another thread is fetching it."""
        with _LOCK:
            window = self._pages.get(position // PAGE)
            is_mine = window is None
            if window is None:
                window = self._new_window(position // PAGE * PAGE, end, pages)
        if is_mine:
            self._fetch(window)
        window.ready.wait()
        if window.error is not None:
            raise window.error
        return window

    def _new_window(self, start: int, end: int, pages: int) -> _Window:
        """A new window in the register, which the caller has locked and fills."""
        stop = max(end, start + pages * PAGE)
        aligned = (start // WINDOW + 1) * WINDOW
        stop = min(-(-stop // PAGE) * PAGE, aligned)
        page = start // PAGE + 1
        while page * PAGE < stop and page not in self._pages:
            page += 1
        window = _Window(start, min(page * PAGE, self._size))
        _SHARED.make_room(window.end - start)
        for number in range(start // PAGE, page):
            self._pages[number] = window
        _SHARED.add(self, window)
        return window

    def _fetch(self, window: _Window) -> None:
        try:
            self._fill(window.start, memoryview(window.content))
        except BaseException as error:
            window.error = error
            with _LOCK:
                _SHARED.remove(window)
            if not isinstance(error, Exception):
                raise  # an interruption ends this thread; others get the error from the window
        finally:
            window.ready.set()

    def _fetch_ahead(self, position: int, end: int, reader: _Reader) -> None:
        """Have the next windows of a tensor fetched: one, and twice as many with each window that was entered."""
        last = (position - 1) // WINDOW
        if last == reader.window:
            return
        reader.window = last
        reader.entered += 1
        for number in range(1, min(AHEAD, 2 ** (reader.entered - 1)) + 1):
            begin = (last + number) * WINDOW
            if begin >= min(end, self._size):
                return
            with _LOCK:
                if begin // PAGE in self._pages:
                    continue
                if not _SHARED.has_room(WINDOW):
                    return
                window = self._new_window(begin, begin + WINDOW, WINDOW // PAGE)
            _PREFETCH.put(partial(self._fetch, window))

    def forget(self, window: _Window) -> None:
        """Drop a window. The caller has locked the register."""
        for number in range(window.start // PAGE, -(-window.end // PAGE)):
            if self._pages.get(number) is window:
                del self._pages[number]


class _Shared:
    """The windows of all objects, in the order in which they were made."""

    def __init__(self) -> None:
        self._windows: OrderedDict[int, tuple[Windows, _Window]] = OrderedDict()
        self._nbytes = 0
        self.announced = Announced()

    def add(self, owner: Windows, window: _Window) -> None:
        self._windows[id(window)] = owner, window
        self._nbytes += len(window.content)

    def remove(self, window: _Window) -> None:
        found = self._windows.pop(id(window), None)
        if found is not None:
            self._nbytes -= len(window.content)
            found[0].forget(window)

    def abandon(self, owner: Windows) -> None:
        self.announced.forget(owner)
        for of_object, window in list(self._windows.values()):
            if of_object is owner:
                self.remove(window)

    def make_room(self, nbytes: int) -> None:
        """Drop windows for a reader that waits: those that were read first, then others that have arrived."""
        for is_wanted in (_was_read, _has_arrived):
            self._drop(nbytes, is_wanted)

    def has_room(self, nbytes: int) -> bool:
        """True if a window may be fetched ahead. Drops only windows that were read."""
        self._drop(nbytes, _was_read)
        return self._nbytes + nbytes <= BUDGET

    def _drop(self, nbytes: int, is_wanted: Callable[[_Window], bool]) -> None:
        if self._nbytes + nbytes <= BUDGET:
            return
        for _, window in list(self._windows.values()):
            if is_wanted(window):
                self.remove(window)
                if self._nbytes + nbytes <= BUDGET:
                    return


def _was_read(window: _Window) -> bool:
    return window.ready.is_set() and window.unread <= 0


def _has_arrived(window: _Window) -> bool:
    return window.ready.is_set()


class _Prefetch:
    """Threads that fetch ahead. They start with the first task, and end with the process."""

    def __init__(self) -> None:
        self.begin()
        # A forked process has none of the threads. Without this, its readers would wait for them for ever.
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Forget the threads and tasks of another process."""
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def put(self, task: Callable[[], None]) -> None:
        if len(self._threads) < CONNECTIONS:
            name = f"prefetch-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
        self._tasks.put(task)

    def _work(self) -> None:
        while True:
            self._tasks.get()()


_LOCK = threading.Lock()
"""One lock for all registers: looking up a window takes a microsecond."""
_SHARED = _Shared()
_PREFETCH = _Prefetch()
