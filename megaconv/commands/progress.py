"""How far a command is, on stderr: a bar in a terminal; elsewhere (a log, a job) a line every half minute."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from types import TracebackType
from typing import Any

from megaconv.commands.endings import say

LINE_SECONDS = 30.0


class Progress:
    """A context manager; advance() may be called from any thread."""

    def __init__(self, title: str, total: Callable[[], int], *, shown: bool = True) -> None:
        """total: bytes; asked for only if somebody is looking, or when the first line is due."""
        self._title, self._total, self._shown = title, total, shown
        self._bar: Any = None
        self._lock = Lock()
        self._done = 0
        self._all: int | None = None
        self._started = self._told = time.monotonic()

    def __enter__(self) -> "Progress":
        if self._shown and sys.stderr.isatty():
            from megaconv.commands.bar import make_bar

            self._bar = make_bar()
            self._task = self._bar.add_task(self._title, total=self._total())
            self._bar.start()
        return self

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)
        elif self._shown and self._is_due(count):
            self._tell()

    def _is_due(self, count: int) -> bool:
        """Whether somebody has to tell, who is the only one then."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            due = now - self._told >= LINE_SECONDS
            self._told = now if due else self._told
            return due

    def _tell(self) -> None:
        from megaconv.commands.inspection import readable

        if self._all is None:
            self._all = self._total()
        speed = self._done / max(time.monotonic() - self._started, 1e-9)
        left = max(self._all - self._done, 0) / max(speed, 1e-9)
        amount = f"{readable(self._done)} of {readable(self._all)} ({100 * self._done // max(self._all, 1)}%)"
        say(f"{self._title}: {amount}, {readable(int(speed))}/s, {left:.0f} s left")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with suppress(OSError):  # the terminal has gone
                self._bar.stop()
