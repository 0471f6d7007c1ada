"""Records the state of every source file at the time when it was opened.

Every function that opens a file of a checkpoint records it here. If a source file changed during a run, the output
would be a mixture of two states. Therefore the files are checked again before the output appears. A resumed run
compares the same list.
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
from formats.file_limit import is_limit, limit_reached
from formats.partial_files import Origin, PartialFile, RemoteState
from formats.partial_files import find as find_partial


class FileState(NamedTuple):
    """A file's state. It changes when the file's bytes change, and when another file takes its name."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


class Checked(Readable, Protocol):
    """A file that contains checksums."""

    checks: list[EntryCheck]
    begun: set[Entry]
    """Entries of `checks` that were read partly."""


class OpenedFiles:
    """A context manager that can be entered repeatedly. It records the files that are opened inside.

    It works in its own thread, and in threads that run in a copy of its context.
    """

    def __init__(self) -> None:
        self._states: dict[str, FileState] = {}
        self._remote: dict[str, PartialFile] = {}
        """URI of each object of a store -> its stand-in."""
        self._tokens: list[Token[OpenedFiles | None]] = []
        self._checked: list[Checked] = []

    def __enter__(self) -> "OpenedFiles":
        self._tokens.append(_current.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _current.reset(self._tokens.pop())

    def note(self, path: Path, status: os.stat_result) -> None:
        """Record a file's state. Only the first state of each file counts."""
        partial = find_partial(path)
        if partial is not None:
            self._remote.setdefault(partial.state.uri, partial)
            return
        self._states.setdefault(os.path.abspath(path), FileState.of(status))  # noqa: PTH100 (resolves no links)

    def listing(self) -> list[tuple[str, int, int | str]]:
        """(path, size, modification time in ns) of each file, (URI, size, tag) of each object of a store. The list is
        the same on every machine that sees the same files."""
        local: list[tuple[str, int, int | str]] = [
            (path, state.size, state.mtime_ns) for path, state in sorted(self._states.items())
        ]
        remote = [partial.state for _, partial in sorted(self._remote.items())]
        return local + [(state.uri, state.size, state.tag) for state in remote]

    def inode_changes(self) -> list[int]:
        """The inode change time of each file in ns, in the same order: the last write, rename or exchange. It is valid
        on this machine only. An object of a store has none: its tag changes with its content."""
        return [state.ctime_ns for _, state in sorted(self._states.items())] + [0] * len(
            self._remote
        )

    def note_checked(self, file: "Checked") -> None:
        self._checked.append(file)

    def begun_entries(self) -> list[Entry]:
        """The entries that were read partly, so that their checksums have not been compared."""
        return [entry for file in self._checked for entry in tuple(file.begun)]

    def compared_entries(self) -> list[Entry]:
        """The entries that were read completely, and whose checksums were right."""
        return [check.entry for file in self._checked for check in file.checks if check.compared]

    def require_as_stored(self, only: Collection[Entry] | None = None) -> None:
        """Check the sources after everything that is needed was read.

        Finishes and compares the checksums of entries that were read partly. only: checks just these entries; None:
        all. Raises CorruptCheckpoint for a wrong checksum, and for a file that has changed since it was opened.
        """
        for file in self._checked:
            for check in file.checks:
                if only is None or check.entry in only:
                    check.finish(file)
        self.require_unchanged()

    def abandon(self) -> None:
        """Give up what stores' objects have fetched ahead: the run has ended, and reads nothing more."""
        for partial in list(self._remote.values()):  # a loader may still be at work
            partial.abandon()

    def require_unchanged(self) -> None:
        """Raise CorruptCheckpoint, with the file's name, if a file has changed.

        Raises CheckpointError if no file can be opened any more, so that nobody knows.
        """
        # Other threads may open files meanwhile: those of a server serve ranges at the same time.
        for path, state in list(self._states.items()):
            try:
                # Open the file again: only then does a network file system show its current state.
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    now = FileState.of(os.fstat(descriptor))
                finally:
                    os.close(descriptor)
            except OSError as error:
                if is_limit(error):
                    raise limit_reached(path) from error
                raise CorruptCheckpoint(
                    f"{path}: was there when it was opened, and can't be opened any more ({error.strerror}); {_AGAIN}"
                ) from error
            if now != state:
                raise CorruptCheckpoint(
                    f"{path}: was {_change(state, now)} while it was read; {_AGAIN}"
                )
        by_origin: dict[int, tuple[Origin, list[RemoteState]]] = {}
        for partial in list(self._remote.values()):
            origin = partial.origin
            by_origin.setdefault(id(origin), (origin, []))[1].append(partial.state)
        for origin, states in by_origin.values():
            origin.require_unchanged(states)


_AGAIN = "the data that was read mixes two states, so nothing was written. Run again when no program writes to the source"
_current: ContextVar[OpenedFiles | None] = ContextVar("opened_files", default=None)


def _change(before: FileState, now: FileState) -> str:
    return "changed" if (before.device, before.inode) == (now.device, now.inode) else "replaced"


def note(path: Path, status: os.stat_result) -> None:
    """Record a file. status: the status of the file that is being opened."""
    opened = _current.get()
    if opened is not None:
        opened.note(path, status)


def note_checked(file: Checked) -> None:
    """Record a file with checksums, whose tensors may still be read."""
    opened = _current.get()
    if opened is not None:
        opened.note_checked(file)


def begun_entries() -> list[Entry]:
    """The partly read entries of all files opened so far. See OpenedFiles."""
    opened = _current.get()
    return opened.begun_entries() if opened is not None else []


@contextmanager
def not_recorded() -> Iterator[None]:
    """A block in which opened files are not recorded. It is for files that may change without making the data that is
    read wrong."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)
