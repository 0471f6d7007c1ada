"""What has been finished of an output, for a run that goes on with it: a JSON object a line, behind a checksum of its bytes.

    1c291ca3 {"plan": "…"}
    7b2d9f40 {"tensor": …}

The first line that doesn't fit its checksum ends a journal: it was being written when the run was killed, or the disk has
changed it since. What follows it is done again.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO


class Journal:
    """A file that only grows, and is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def read(self) -> list[dict[str, Any]]:
        """The entries of an earlier run; none where there is no journal."""
        return self._parse()[0]

    def open(self, *, keep: bool) -> None:
        """For appending; keep: behind the entries that read() gives."""
        end = self._parse()[1] if keep else 0
        self._file = self.path.open("ab")
        self._file.truncate(end)

    def append(self, entries: list[dict[str, Any]]) -> None:
        """Returns when they are on disk. What they vouch for has to be there before."""
        assert self._file is not None
        self._file.write(b"".join(map(_line, entries)))
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def close(self) -> None:
        """May be called again, also after it failed."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _parse(self) -> tuple[list[dict[str, Any]], int]:
        """The entries, and the bytes that they take."""
        entries: list[dict[str, Any]] = []
        end = 0
        for line in self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else ():
            entry = _entry(line)
            if entry is None:
                break
            entries.append(entry)
            end += len(line)
        return entries, end


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _entry(line: bytes) -> dict[str, Any] | None:
    checksum, _, text = line.partition(b" ")
    if not text.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text[:-1]):
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
