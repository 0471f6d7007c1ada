"""Writes a file so that it appears complete or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from formats.renames import sync_directory
from formats.staged_file import write_error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or replace it. Devices and pipes get the bytes directly.

    Raises NotEnoughSpace if the disk is full, CheckpointError if the file can't be written. An older file stays then.
    """
    try:
        with whole_file(path) as file:
            file.write(content)
    except BrokenPipeError:  # nobody reads the output any more
        raise
    except OSError as error:
        raise write_error(error, path) from error


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` at the end. Devices and pipes are opened themselves.

    An error leaves an older file as it was. Raises OSError if the file can't be written.
    """
    place = path.resolve()  # a link stays one: the file behind it is replaced
    if place.exists() and not place.is_file():
        with place.open("wb") as file:
            yield file
        return
    partial = place.parent / f".megaconv-{token_hex(8)}-partial"
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(place.parent)
