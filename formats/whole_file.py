"""Writes a small file so that it appears complete or not at all."""

import os
from pathlib import Path

from formats.renames import sync_directory
from formats.staged_file import write_error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or replace it. Devices and pipes get the bytes directly.

    Raises NotEnoughSpace if the disk is full, CheckpointError if the file can't be written. An older file stays then.
    """
    place = path.resolve()  # a link stays one: the file behind it is replaced
    partial = place.parent / f".megaconv-{os.getpid()}-partial"
    try:
        if place.exists() and not place.is_file():
            place.write_bytes(content)
            return
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(place)
        finally:
            partial.unlink(missing_ok=True)
        sync_directory(place.parent)
    except BrokenPipeError:  # nobody reads the output any more
        raise
    except OSError as error:
        raise write_error(error, path) from error
