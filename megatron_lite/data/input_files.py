"""Finds the files that a flag names: files, patterns, and directories with their whole content; and detects plain text.

| name | content |
|---|---|
| `.txt`, `.text`, `.md`, each also `.gz`, `.zst` | plain text: one document |
| any other, or with a JSON object in its first line | records: JSON lines or parquet, whatever the file is called |
"""

import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.text_files import STDIN, read_start, read_whole

TEXT_SUFFIXES = (".txt", ".text", ".md")
COMPRESSED = (".gz", ".zst")


def find_inputs(words: Sequence[str], flag: str = "--input") -> list[str]:
    """Return the files in order; those of patterns and directories are sorted.

    Raises UsageError for a missing file, and for a directory that mixes plain text and records.
    """
    found: list[str] = []
    for word in words:
        is_file = word == STDIN or Path(word).exists()
        matches = [word] if is_file else sorted(glob.glob(word, recursive=True))  # noqa: PTH207
        if not matches:
            raise UsageError(
                f"{flag} {word}: there is no such file, and no file matches it as a pattern"
            )
        for match in matches:
            found += _files_of(match, flag) if Path(match).is_dir() else [match]
    if found.count(STDIN) > 1:
        raise UsageError(f"{flag}: standard input can be read once only")
    return found


def _files_of(directory: str, flag: str) -> list[str]:
    """Return all visible files of a directory and its subdirectories, sorted."""
    found = _visible_files(directory)
    for name in found:
        if not Path(name).is_file():
            raise UsageError(
                f"{flag} {directory}: {name} is no regular file; name the files that are meant"
            )
    if not found:
        raise UsageError(f"{flag} {directory}: there are no files in this directory")
    found.sort()
    texts = [name for name in found if _is_named_as_text(name)]
    others = [name for name in found if not _is_named_as_text(name)]
    if texts and others:
        raise UsageError(
            f"{flag} {directory}: has plain text ({texts[0]}) and other files ({others[0]}); name the files that are meant"
        )
    return found


def _visible_files(directory: str) -> list[str]:
    """Return everything in a directory and its subdirectories that is no directory and whose name starts with no dot."""
    found: list[str] = []
    visited = {os.path.realpath(directory)}  # a link may lead back to a parent directory
    for place, names, files in os.walk(directory, followlinks=True):
        visible = sorted(name for name in names if not name.startswith("."))
        real_paths = {name: os.path.realpath(Path(place) / name) for name in visible}
        names[:] = [name for name in visible if real_paths[name] not in visited]
        visited.update(real_paths.values())
        for name in files:
            if not name.startswith("."):
                found.append(str(Path(place) / name))
    return found


def is_plain_text(name: str) -> bool:
    """Return whether a file is plain text. Raises CorruptCheckpoint for a file that can't be read."""
    return _is_named_as_text(name) and not _begins_with_object(read_start(name))


def _is_named_as_text(name: str) -> bool:
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes]
    while suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in TEXT_SUFFIXES


def _begins_with_object(start: bytes) -> bool:
    """Return whether the first line is a JSON object, as in JSON lines named .txt."""
    line, end, _ = start.lstrip().partition(b"\n")
    if not line.startswith(b"{"):
        return False
    if not end:  # the line may continue after this piece of the file
        return line[1:].lstrip().startswith(b'"')
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def read_text(name: str) -> str:
    """Return the whole of a plain text file. Raises CorruptCheckpoint."""
    try:
        return read_whole(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(
            f"{name}: is not text in UTF-8: byte {error.start} of it"
        ) from error
