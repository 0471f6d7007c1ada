"""Opens files that somebody else wrote: only regular files, and small files only up to a size limit.

Reading a named pipe would block forever, and reading a device might never end. A directory can't be read at all.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from formats.ceilings import JSON_DEPTH, JSON_VALUE_BYTES, JSON_VALUES
from formats.errors import CheckpointError, CorruptCheckpoint
from formats.file_limit import is_limit, limit_reached
from formats.mistaken_files import SEEN_BYTES, mistaken
from formats.opened import note
from formats.partial_files import fetch_whole
from formats.partial_files import find as find_partial

_KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


def regular_size(path: Path) -> int:
    """Size of a regular file in bytes; links are followed. Raises CorruptCheckpoint for anything else."""
    try:
        return _size(path, path.stat())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def open_regular(path: Path, *, holes: bool = False) -> int:
    """A descriptor for reading a regular file, which the caller closes. Raises CorruptCheckpoint for anything else.

    holes: don't fetch the missing bytes of a stand-in; the caller reads only ranges that it has required.
    """
    size = regular_size(path)  # merely opening some devices has effects
    partial = None if holes else find_partial(path)
    if partial is not None:
        partial.require(0, size)
    try:
        # The file may have become a pipe just now. Opening it must not wait for a writer.
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
    """The content of a regular file of at most `ceiling` bytes. Raises CorruptCheckpoint for anything else."""
    descriptor = open_regular(path, holes=True)
    try:
        size = os.fstat(descriptor).st_size
        if size <= ceiling and (partial := find_partial(path)) is not None:
            partial.require(0, size)
        content = b"" if size > ceiling else _read(descriptor, ceiling)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    _within(path, max(size, len(content)), ceiling)
    return content


def check_size(path: Path, ceiling: int) -> None:
    """Raise CorruptCheckpoint unless a file is regular and has at most `ceiling` bytes. It is for files that other
    libraries read whole."""
    descriptor = open_regular(path, holes=True)
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    _within(path, size, ceiling)
    fetch_whole([path])


def _within(path: Path, size: int, ceiling: int) -> None:
    if size > ceiling:
        raise CorruptCheckpoint(
            f"{path}: has {size:,} bytes; no file of this kind has more than {ceiling:,}"
        )


def _read(descriptor: int, ceiling: int) -> bytes:
    """Read at most one byte more than the ceiling: a file may grow, and some files that claim to be empty are not."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read(ceiling + 1)


def read_json(path: Path, ceiling: int, **hooks: Any) -> Any:
    """The value of a small JSON file. Raises CorruptCheckpoint for a file that is too large or is not JSON.

    hooks: options of json.loads.
    """
    content = read_small(path, ceiling)
    try:
        return parse_json(content, **hooks)
    except (ValueError, RecursionError) as error:
        instead = mistaken(content[:SEEN_BYTES])
        if instead:
            raise CorruptCheckpoint(f"{path}: {instead}") from error
        raise CorruptCheckpoint(f"{path}: is not a readable JSON file ({error})") from error


def parse_json(content: bytes, *, most_values: int | None = None, **hooks: Any) -> Any:
    """json.loads of UTF-8 within limits of memory and time. The caller has to limit the size of the content.

    most_values: maximum number of separators; None: the number that JSON_VALUE_BYTES allows. hooks: options of
    json.loads. Raises ValueError or RecursionError.
    """
    separators = sum(content.count(separator) for separator in (b"[", b"{", b":", b","))
    allowed = JSON_VALUES + len(content) // JSON_VALUE_BYTES if most_values is None else most_values
    if separators > allowed:
        raise ValueError(
            f"{len(content):,} bytes with {separators:,} values are more than any checkpoint has"
        )
    value = json.loads(content.decode("utf-8"), **hooks)
    require_flat(value)
    return value


def require_flat(value: Any, most_levels: int = JSON_DEPTH) -> None:
    """Raise ValueError for a value of too many levels, on which recursive functions would fail."""
    level = [value]
    for _ in range(most_levels):
        # Walk one level at a time, and only containers, so that a vocabulary's two million texts are not copied.
        below: list[Any] = []
        for each in level:
            members = each.values() if isinstance(each, dict) else each
            if isinstance(each, dict | list):
                below += [member for member in members if isinstance(member, dict | list)]
        if not below:
            return
        level = below
    raise ValueError(f"it is nested more than {most_levels} levels deep")


def _size(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")
        raise CorruptCheckpoint(f"{path}: is {kind}, where a file should be")
    note(path, status)
    return status.st_size


def _unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    if is_limit(error):
        return limit_reached(path)
    # A ValueError: the name has a zero byte, or characters that no file system has.
    if isinstance(error, ValueError) or error.errno in (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENAMETOOLONG,
    ):
        return CorruptCheckpoint(f"{path}: no such file", code="missing-file")
    return CorruptCheckpoint(f"{path}: can't be read: {error.strerror}")
