"""The files that something was read from, as they were when they were opened.

Whoever opens a file of a checkpoint notes it here. An output that was made while one of them changed would be a mixture of
two states: so they are looked at once more before it appears. A run that goes on with an earlier one's work compares the
same list.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from formats.entry_check import Entry, EntryCheck, Readable
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


class Checked(Readable, Protocol):
    """A file with checksums inside."""

    checks: list[EntryCheck]
    begun: set[Entry]
    """Of those of them of which a part was read."""


class OpenedFiles:
    """A context manager, again and again: files that are opened within are noted.

    In its own thread, and in those that run in a copy of its context.
    """

    def __init__(self) -> None:
        self._states: dict[str, FileState] = {}
        self._tokens: list[Token[OpenedFiles | None]] = []
        self._checked: list[Checked] = []

    def __enter__(self) -> "OpenedFiles":
        self._tokens.append(_current.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.reset(self._tokens.pop())

    def note(self, path: Path, status: os.stat_result) -> None:
        """What was noted first is what counts."""
        self._states.setdefault(os.path.abspath(path), FileState.of(status))  # noqa: PTH100 (resolves no links)

    def listing(self) -> list[tuple[str, int, int]]:
        """(path, size, time of the last change in ns) of each file: the same on every machine that sees the same files."""
        return [(path, state.size, state.mtime_ns) for path, state in sorted(self._states.items())]

    def inode_changes(self) -> list[int]:
        """When each file was last written, renamed or exchanged for another, in the same order; of this machine's copies."""
        return [state.ctime_ns for _, state in sorted(self._states.items())]

    def note_checked(self, file: "Checked") -> None:
        self._checked.append(file)

    def begun_entries(self) -> list[Entry]:
        """Those of which a part was read, so that nobody has compared their checksums."""
        return [entry for file in self._checked for entry in tuple(file.begun)]

    def compared_entries(self) -> list[Entry]:
        """Those of which all was read, and whose checksums were right."""
        return [check.entry for file in self._checked for check in file.checks if check.compared]

    def require_as_stored(self, only: Collection[Entry] | None = None) -> None:
        """To be called when all that is needed was read.

        Compares the checksums of entries that were read but for a rest. only: of these alone; None: of all. Raises
        CorruptCheckpoint for a checksum that is wrong, and for files that aren't as they were when they were opened.
        """
        for file in self._checked:
            for check in file.checks:
                if only is None or check.entry in only:
                    check.finish(file)
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        """Raises CorruptCheckpoint, naming the file, unless all are as they were."""
        for path, state in self._states.items():
            try:
                # Opened anew, since a network file system tells the truth about a file only then.
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    now = FileState.of(os.fstat(descriptor))
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise CorruptCheckpoint(
                    f"{path}: was there when it was opened, and can't be opened any more ({error.strerror}); {_AGAIN}"
                ) from error
            if now != state:
                raise CorruptCheckpoint(f"{path}: was {_change(state, now)} while it was read; {_AGAIN}")


_AGAIN = "what was read is a mixture of two states, and nothing was written. Run again when nobody writes to the source"
_current: ContextVar[OpenedFiles | None] = ContextVar("opened_files", default=None)


def _change(before: FileState, now: FileState) -> str:
    return "changed" if (before.device, before.inode) == (now.device, now.inode) else "replaced"


def note(path: Path, status: os.stat_result) -> None:
    """status: of the file that is being opened."""
    opened = _current.get()
    if opened is not None:
        opened.note(path, status)


def note_checked(file: Checked) -> None:
    """Noted while its tensors may still be read."""
    opened = _current.get()
    if opened is not None:
        opened.note_checked(file)


def begun_entries() -> list[Entry]:
    """Of all files that were opened up to now. See OpenedFiles."""
    opened = _current.get()
    return opened.begun_entries() if opened is not None else []


@contextmanager
def not_recorded() -> Iterator[None]:
    """A block for files that may change without making anything of what is read wrong."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)
