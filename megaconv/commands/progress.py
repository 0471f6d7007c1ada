"""Shows a command's progress on stderr: a bar in a terminal; elsewhere (a log, a job) a line every half minute."""

import sys
import time
from contextlib import suppress
from threading import Lock
from types import TracebackType
from typing import Any

from megaconv.commands.endings import say

LINE_SECONDS = 30.0


class Progress:
    """A context manager that counts bytes. Any thread may call advance()."""

    def __init__(self, title: str, *, shown: bool = True) -> None:
        self._title, self._shown = title, shown
        self._bar: Any = None
        self._lock = Lock()
        self._done = self._total = 0
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def expect(self, total: int) -> None:
        """Begin to count, or begin again for another pass. total: bytes of the pass. In a terminal, the bar appears."""
        self._stop()
        self._done, self._total = 0, total
        self._started = self._last_line = time.monotonic()
        if self._shown and sys.stderr.isatty():
            from megaconv.commands.bar import make_bar

            self._bar = make_bar()
            self._task = self._bar.add_task(self._title, total=total)
            self._bar.start()

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)
        elif self._shown and self._is_due(count):
            self._tell()

    def _is_due(self, count: int) -> bool:
        """True if a line is due. Only one of several threads gets True."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            due = now - self._last_line >= LINE_SECONDS
            self._last_line = now if due else self._last_line
            return due

    def _tell(self) -> None:
        from megaconv.commands.units import readable

        speed = self._done / max(time.monotonic() - self._started, 1e-9)
        left = max(self._total - self._done, 0) / max(speed, 1e-9)
        share = 100 * self._done // max(self._total, 1)
        amount = f"{readable(self._done)} of {readable(self._total)} ({share}%)"
        say(f"{self._title}: {amount}, {readable(int(speed))}/s, {left:.0f} s left")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        """Remove the bar, if there is one."""
        if self._bar is not None:
            with suppress(OSError):  # the terminal is gone
                self._bar.stop()
            self._bar = None
