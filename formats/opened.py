"""The files that something was read from, as they were when they were opened.

Whoever opens a file of a checkpoint notes it here. An output that was made while one of them changed would be a mixture of
two states: so they are looked at once more before it appears. A run that goes on with an earlier one's work compares the
same list.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from formats.errors import CorruptCheckpoint


class FileState(NamedTuple):
    """What changes whenever a file's bytes do, or another file gets its name."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class OpenedFiles:
    """A context manager, again and again: files that are opened within are noted.

    In its own thread, and in those that run in a copy of its context.
    """

    def __init__(self) -> None:
        self._states: dict[str, FileState] = {}
        self._tokens: list[Token[OpenedFiles | None]] = []

    def __enter__(self) -> "OpenedFiles":
        self._tokens.append(_current.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.reset(self._tokens.pop())

    def note(path: Path, status: os.stat_result) -> None:
    """status: of the file that is being opened."""
    opened = _current.get()
    if opened is not None:
        opened.note(path, status)


@contextmanager
def unnoted() -> Iterator[None]:
    """A block for files that may change without making anything of what is read wrong."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)
