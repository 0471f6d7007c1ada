"""The interface of an output while it grows: files that any thread writes at any position, a journal, and a commit.

formats/staging.py           a directory on a disk
formats/stores/target.py     a prefix of an object store
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from formats.output import Unwritten
from formats.tensor import Bytes


class OutputFile(Protocol):
    """A file of known size. Any thread may write at any position."""

    def write(self, offset: int, data: Bytes | bytes) -> None:
        """Write contiguous bytes at their offset."""
        ...

    def holds(self, start: int, end: int) -> bool:
        """True if the bytes of a range, once written, survive the end of this process after the next sync()."""
        ...

    def sync(self) -> None:
        """Bring what was written to where it stays."""
        ...

    def close(self) -> None:
        """Close the file. It may be called again."""
        ...


class GrowingFile(Protocol):
    """A file that grows at its end, and whose size is known only at the end. One thread writes."""

    @property
    def size(self) -> int:
        """Size in bytes so far."""
        ...

    def resume(self, size: int) -> bool:
        """Continue behind the first `size` bytes of an earlier run; 0 for a new file. Call it first.

        False if they aren't there: the file is then empty.
        """
        ...

    def write(self, data: bytes) -> None:
        """Append bytes."""
        ...

    def sync(self) -> None:
        """Bring what was written to where it survives the end of this process."""
        ...

    def finish(self) -> None:
        """Write what still waits. Nothing is written after this call."""
        ...

    def close(self) -> None:
        """Close the file. It may be called again."""
        ...


class Target(Protocol):
    """An output that appears complete or not at all. All methods raise CheckpointError."""

    committed: bool
    """True after the output has become visible."""
    journal_pause: float
    """The factor by which the journal is written less often than on a disk."""

    @property
    def target(self) -> Path | str:
        """The place of the output: a path, or a URI."""
        ...

    def require_space(self, size: int) -> None:
        """Raise NotEnoughSpace if an output of `size` bytes can't be written."""
        ...

    def open(
        self, plan: Mapping[str, str], *, resume: bool, sizes: Mapping[str, int] | None = None
    ) -> list[dict[str, Any]]:
        """Begin, or take over the work of an interrupted run with the same plan. Returns its journal's entries."""
        ...

    def file(
        self, name: str, size: int, *, keep: bool = False, unwritten: Unwritten | None = None
    ) -> OutputFile:
        """A new file of the output.

        keep: the bytes that an earlier run wrote stay in it. unwritten: the ranges that nobody writes, for a file with
        tensors. A disk doesn't need them.
        """
        ...

    def grow(self, name: str, most_bytes: int) -> GrowingFile:
        """A new file of the output that grows. most_bytes: the largest possible size."""
        ...

    def record(self, entries: list[dict[str, Any]]) -> None:
        """Append to the journal. The data that the entries describe has to be where it stays."""
        ...

    def fail(self, error: BaseException) -> None:
        """End threads that wait in write()."""
        ...

    def finish(self) -> None:
        """Bring this process's files to where they stay. Nothing is written after this call."""
        ...

    def readable(self) -> Path:
        """A directory with the complete output, to read it back before it appears."""
        ...

    def commit(self) -> None:
        """Make the output appear."""
        ...

    def discard(self) -> bool:
        """Remove what was written. Returns False if something is left, which a warning names."""
        ...

    def keep(self) -> None:
        """Leave what was written to a run that resumes, or to member 0."""
        ...
