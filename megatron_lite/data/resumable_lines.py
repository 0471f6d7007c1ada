"""JSON lines that a command writes one by one, and continues after an interruption.

A resumed run computes whole blocks of lines, as an unbroken run does. The first block may have complete lines already.
They are compared with the new ones, so that a run with other flags is noticed.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from formats.errors import CorruptCheckpoint
from megaconv.errors import TargetExists, UsageError

Check = Callable[[int, Mapping[str, Any]], None]
"""Receives each line that is there already, with its number from 0. It raises UsageError for a line of another run."""


class ResumableLines:
    """An output file of JSON lines. A context. `write` brings each line to the file at once."""

    def __init__(self, path: Path, *, resume: bool, overwrite: bool, block: int) -> None:
        """block: number of lines that are computed together.

        Raises TargetExists for an existing file if neither `resume` nor `overwrite` is set.
        """
        if path.exists() and not (resume or overwrite):
            raise TargetExists(f"{path}: exists; pass --resume to continue it, or choose another")
        self.path = path
        self.first = 0
        """Number of the first line to compute, a multiple of `block`."""
        self.complete = 0
        """Number of complete lines that the file had at the start."""
        self._block = block
        self._old: list[bytes] = []
        """The complete lines from `first` on."""
        self._number = 0
        self._keeps = resume and path.exists()
        self._replaces = not self._keeps
        """True if an older file's content is to be removed."""
        self._file: BinaryIO | None = None

    def start(self, total: int | None = None, check: Check = lambda number, line: None) -> None:
        """Open the file, check the lines that are there, and drop an incomplete last line.

        A file to replace keeps its content until the first line is written.
        total: number of lines of the whole run. Raises UsageError, CorruptCheckpoint.
        """
        try:
            file = self.path.open("r+b" if self._keeps else "ab")
        except OSError as error:
            raise UsageError(f"{self.path}: can't be written: {error.strerror}") from error
        self._file = file
        size = self._read(file, check) if self._keeps else 0
        if total is not None and self.complete > total:
            raise UsageError(
                f"{self.path}: has {self.complete:,} lines, and this run writes {total:,}; resume with the same flags"
            )
        if self._keeps:
            file.seek(size)
            file.truncate()
        if self.complete == total:
            self.first, self._old = self.complete, []
        self._number = self.first

    def _read(self, file: BinaryIO, check: Check) -> int:
        """Return the bytes of all complete lines."""
        size = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            check(self.complete, self._parsed(line))
            if self.complete % self._block == 0:
                self.first, self._old = self.complete, []
            self._old.append(line)
            self.complete += 1
            size += len(line)
        if len(self._old) == self._block:
            self.first, self._old = self.complete, []
        return size

    def _parsed(self, line: bytes) -> Mapping[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CorruptCheckpoint(
                f"{self.path}:{self.complete + 1}: is no JSON object; write to another file"
            )
        return found

    def write(self, fields: Mapping[str, Any]) -> None:
        """Write the next line. Raises UsageError if the file has another line there."""
        assert self._file is not None, "start() opens the file"
        line = json.dumps(fields, ensure_ascii=False).encode() + b"\n"
        if self._replaces:
            self._file.truncate(0)
            self._replaces = False
        place = self._number - self.first
        self._number += 1
        if place >= len(self._old):
            self._file.write(line)
            self._file.flush()
        elif line != self._old[place]:
            raise UsageError(
                f"{self.path}:{self._number}: was written with other flags; resume with the same flags and layout"
            )

    def __enter__(self) -> "ResumableLines":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
