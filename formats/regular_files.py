"""Opening files that somebody else wrote: regular files alone, and small ones up to a ceiling.

A named pipe would be waited for without end, a device be read without end; a directory is neither.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from formats.ceilings import JSON_TEXT_BYTES, JSON_VALUES
from formats.errors import CorruptCheckpoint
from formats.mistaken_files import SEEN_BYTES, mistaken
from formats.opened import note

_KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


def regular_size(path: Path) -> int:
    """Bytes of a regular file, which links may lead to. Raises CorruptCheckpoint for anything else."""
    try:
        return _size(path, path.stat())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def open_regular(path: Path) -> int:
    """A descriptor to read a regular file with, which the caller closes. Raises CorruptCheckpoint for anything else."""
    regular_size(path)  # opening some devices has effects already
    try:
        # It may have become a pipe just now: opening must not wait for whoever writes into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        _size(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_small(path: Path, ceiling: int) -> bytes:
    """A whole regular file of at most `ceiling` bytes. Raises CorruptCheckpoint for anything else."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        content = b"" if size > ceiling else _read(descriptor, ceiling)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    _within(path, max(size, len(content)), ceiling)
    return content


def check_size(path: Path, ceiling: int) -> None:
    """For a file that others read whole: raises CorruptCheckpoint unless it is a regular one of at most so many bytes."""
    descriptor = open_regular(path)
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    _within(path, size, ceiling)


def _within(path: Path, size: int, ceiling: int) -> None:
    if size > ceiling:
        raise CorruptCheckpoint(f"{path}: has {size:,} bytes; no file of this kind has more than {ceiling:,}")


def _read(descriptor: int, ceiling: int) -> bytes:
    """At most one byte more than the ceiling: a file may grow, and some that say they are empty aren't."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read(ceiling + 1)


def read_json(path: Path, ceiling: int) -> Any:
    """The value of a small JSON file. Raises CorruptCheckpoint for what is too large, or is not JSON."""
    content = read_small(path, ceiling)
    try:
        return parse_json(content)
    except (ValueError, RecursionError) as error:
        instead = mistaken(content[:SEEN_BYTES])
        if instead:
            raise CorruptCheckpoint(f"{path}: {instead}") from error
        raise CorruptCheckpoint(f"{path}: is not a readable JSON file ({error})") from error


def parse_json(content: bytes, **hooks: Any) -> Any:
    """json.loads of UTF-8 within bounds of memory and time. Raises ValueError, or RecursionError; hooks: json.loads' own."""
    text_bytes = len(content) if content.isascii() else 4 * len(content)
    values = sum(content.count(separator) for separator in (b"[", b"{", b":", b","))
    if text_bytes > JSON_TEXT_BYTES or values > JSON_VALUES:
        raise ValueError(f"{len(content):,} bytes with {values:,} values are more than any checkpoint has")
    return json.loads(content.decode("utf-8"), **hooks)


def _size(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")
        raise CorruptCheckpoint(f"{path}: is {kind}, where a file should be")
    note(path, status)
    return status.st_size


def _unreadable(path: Path, error: OSError | ValueError) -> CorruptCheckpoint:
    # A ValueError: a name with a zero byte, or of characters that no file system has.
    if isinstance(error, ValueError) or error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
        return CorruptCheckpoint(f"{path}: no such file")
    return CorruptCheckpoint(f"{path}: can't be read: {error.strerror}")
