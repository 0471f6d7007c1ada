"""Cache of built indices on disk. One process of a machine builds, the others wait, and all map the files.

DIRECTORY/KEY/NAME.npy        a directory appears by one rename, complete
DIRECTORY/KEY.lock            held while building; it is released if the process dies
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import blake3
import numpy as np
from numpy.typing import NDArray

from formats.errors import CheckpointError, CorruptCheckpoint
from formats.file_limit import is_limit, limit_reached

Arrays = Sequence[NDArray[Any]]


def cache_key(**parts: object) -> str:
    """Return a key that is equal for equal parts: numbers, strings, sequences, and numpy arrays by content."""
    digest = blake3.blake3()
    for name, part in sorted(parts.items()):
        if isinstance(part, np.ndarray):
            digest.update(f"{name}: {part.dtype.str} {part.shape}\n".encode())
            digest.update(np.ascontiguousarray(part).view(np.uint8).data if part.size else b"")
        else:
            digest.update(f"{name}: {json.dumps(part)}\n".encode())
    return digest.hexdigest()[:32]


def cached(
    directory: Path | None, key: str, names: Sequence[str], build: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays of build(), one for each name, as read-only maps of files. Without a directory, build() is called.

    Raises CheckpointError if the cache can't be written, CorruptCheckpoint if it can't be read.
    """
    if directory is None:
        return build()
    place = directory / key
    try:
        if not place.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory / f"{key}.lock"):
                if not place.is_dir():
                    _store(dict(zip(names, build(), strict=True)), place)
    except OSError as error:
        if is_limit(error):
            raise limit_reached(place) from error
        raise CheckpointError(
            f"{place}: can't be written: {error.strerror}; give a --data-cache-path where there is space and permission"
        ) from error
    try:
        return [np.load(place / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in names]
    except (OSError, ValueError, EOFError) as error:
        if is_limit(error):
            raise limit_reached(place) from error
        raise CorruptCheckpoint(
            f"{place}: a cached index is damaged ({error}); delete this directory"
        ) from error


def _store(arrays: dict[str, NDArray[Any]], place: Path) -> None:
    staging = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        staging.chmod(0o755)
        for name, values in arrays.items():
            with (staging / f"{name}.npy").open("wb") as file:
                np.save(file, values)
                file.flush()
                os.fsync(file.fileno())
        try:
            staging.rename(place)
        except OSError:
            if not place.is_dir():  # another machine may have been first
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock. On a file system without locks, processes build at the same time and the first one wins."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
