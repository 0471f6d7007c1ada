"""The journal of an output: the finished parts, for a run that resumes. Each line is a checksum and a JSON object.

    1c291ca3 {"plan": {"--dtype": "None", …}}
    7b2d9f40 {"tensor": …}

The first line with a wrong checksum ends a journal. Either the run was killed while it wrote the line, or the disk has
changed it since. A resumed run repeats the work of all lines after it.
"""

import json
import logging
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

_DIGEST = 64
"""Letters of a value such as a digest, which tells a reader nothing."""
_NAMED = 3
"""Number of parts that a message names; there may be one for each file."""
_log = logging.getLogger("megaconv")


def changes(before: object, now: Mapping[str, str]) -> str:
    """The differences between a plan and the plan in a journal: `--dtype is fp32, was None; model.safetensors has
    changed`."""
    if not isinstance(before, Mapping):
        return "another version of megaconv wrote its journal"
    found = [
        _change(part, before.get(part), now.get(part))
        for part in {**now, **before}
        if before.get(part) != now.get(part)
    ]
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return "; ".join(found[:_NAMED]) + more


def warn_of_discarded(place: object, reason: str) -> None:
    """Warn that a run starts again, although an interrupted one has left its work."""
    _log.warning("%s: starts again and discards the work of the interrupted run: %s", place, reason)


def _change(part: str, before: object, now: str | None) -> str:
    if now is None:
        return f"{part} is no longer part of it"
    if before is None:
        return f"{part} was not part of it"
    return f"{part} has changed" if len(now) >= _DIGEST else f"{part} is {now}, was {before}"


class Journal:
    """A file that only grows, and is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def read(self) -> list[dict[str, Any]]:
        """The entries of an earlier run; empty if there is no journal."""
        return self._parse()[0]

    def has_content(self) -> bool:
        """True if an earlier run wrote anything, even if read() doesn't understand it."""
        return self.path.is_file() and self.path.stat().st_size > 0

    def open(self, *, keep: bool) -> None:
        """Open the journal for appending. keep: append after the entries that read() gives; otherwise start again."""
        end = self._parse()[1] if keep else 0
        self._file = self.path.open("ab")
        self._file.truncate(end)

    def append(self, entries: list[dict[str, Any]]) -> None:
        """Append entries, and return when they are on disk. The data that the entries describe has to be on disk
        before."""
        assert self._file is not None
        self._file.write(b"".join(map(line_of, entries)))
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def close(self) -> None:
        """Close the file. It may be called again, even after an error."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _parse(self) -> tuple[list[dict[str, Any]], int]:
        """(the entries, the number of bytes that they take)."""
        entries: list[dict[str, Any]] = []
        end = 0
        for line in self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else ():
            entry = entry_of(line)
            if entry is None:
                break
            entries.append(entry)
            end += len(line)
        return entries, end


def line_of(entry: dict[str, Any]) -> bytes:
    """The line of an entry."""
    text = json.dumps(entry).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def entry_of(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None if its checksum is wrong."""
    checksum, _, text = line.partition(b" ")
    if not text.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text[:-1]):
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
