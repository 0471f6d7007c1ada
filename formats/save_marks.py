"""Marks of one save: the last archive of each `.distcp` file, by which a file of another save is noticed.

    __0_0.distcp    archive · archive · … · mark
    __1_0.distcp    archive · archive · … · the same mark
    common.pt       `save_id`: the same id

A file of the same sizes from another run, or from another iteration, would be read as if it belonged here: neither
torch nor Megatron core names the save in these files. megatron_lite does. No index refers to a mark, so other software
never reads it, and its own files have none.
"""

import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from formats import torch_zip
from formats.errors import CorruptCheckpoint
from formats.output import whole_content
from formats.tensor import InputFile

KEY = "save_id"
ID_LENGTH = 64
"""Number of characters of an id."""
NBYTES = torch_zip.plan({KEY: "0" * ID_LENGTH}, KEY).size
"""Size of a mark."""
_ID = re.compile(rb"[0-9a-f]{%d}" % ID_LENGTH)
_READERS = 16


def append(path: Path, save_id: str) -> None:
    """Append a mark to a file of archives, and flush it to disk. Raises OSError."""
    with path.open("ab") as file:
        file.write(_mark(save_id))
        file.flush()
        os.fsync(file.fileno())


def _mark(save_id: str) -> bytes:
    assert len(save_id) == ID_LENGTH
    return whole_content(torch_zip.plan({KEY: save_id}, KEY))


def read(file: InputFile) -> str | None:
    """Return the id of the save that wrote a file; None if it has no mark. Raises CorruptCheckpoint for a failed read."""
    if file.size < NBYTES:
        return None
    content = file.read(file.size - NBYTES, NBYTES)
    file.close()  # there may be more files than a process may open
    found = _ID.search(content)
    if found is None or content != _mark(found[0].decode()):
        return None
    return found[0].decode()


def require_one_save(common: Path, state: Mapping[str, Any], files: Iterable[InputFile]) -> None:
    """Check that all files are of the save that wrote common.pt. Raises CorruptCheckpoint.

    state: the content of common.pt. Files are not looked at if it has no id, which other software doesn't write.
    Files without any mark are accepted: a program may write the values of common.pt again, with its own files.
    """
    expected = state.get(KEY)
    if expected is None:
        return
    listed = list(files)
    with ThreadPoolExecutor(_READERS) as pool:  # remote files answer slowly
        marks = pool.map(read, listed)
        found = {file.path: save_id for file, save_id in zip(listed, marks, strict=True)}
    if set(found.values()) == {None}:
        return
    for path, save_id in found.items():
        if save_id != expected:
            raise CorruptCheckpoint(
                f"{path}: is of another save than {common.name}; copy all files of one save",
                code="mixed-iterations",
            )
