"""A progress line on stderr, with bytes per second and time left; silent where stderr is no terminal."""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any


class Progress:
    """A context manager; advance() may be called from any thread."""

    def __init__(self, title: str, total: Callable[[], int], *, shown: bool = True) -> None:
        """total: bytes; asked for only if somebody is looking."""
        self._title, self._total, self._shown = title, total, shown
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._title, total=self._total())
            self._bar.start()
        return self

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with suppress(OSError):  # the terminal has gone
                self._bar.stop()
