"""The files of a push, and their hashes as the Hub reports them.

    LFS or xet      lfs.sha256 is the file's SHA-256, lfs.size its size
    others          blob_id is git's SHA-1: over `blob SIZE`, a zero byte, and the content

Folders of git and of a cache are never pushed.
"""

import hashlib
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from megaconv.errors import UnsafeContent, UsageError
from megaconv.options import PushOptions

_READ = 8 << 20


class Hashes(NamedTuple):
    """Size and hashes of a file to be pushed."""

    size: int
    sha256: str
    blob_id: str
    """git's hash of the file."""


def files_to_push(path: Path, options: PushOptions) -> dict[str, Path]:
    """All files below a directory that are to be pushed.

    Raises UnsafeContent for a link that leads out of the directory, UsageError for a link to a directory, for a
    directory that can't be read, and for a name that isn't UTF-8.
    """
    found: dict[str, Path] = {}
    top = path.resolve()
    for folder, folders, names in os.walk(path, onerror=_refuse_unreadable):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".git") and name != ".cache"
        )
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in sorted([*names, *links]):
            file = Path(folder) / name
            below = file.relative_to(path).as_posix()
            if not _is_asked_for(below, options):
                continue
            _require_utf8(file, below)
            real = file.resolve()
            if top not in real.parents and real.parent.name != "blobs":
                # Links to `blobs` are those of the Hub's own cache.
                raise UnsafeContent(
                    f"{file}: is a link to {real}, outside of the directory that is pushed; put the file itself there, "
                    "or --exclude it"
                )
            if not real.is_file():
                what = "a link to a directory" if real.is_dir() else "not a regular file"
                raise UsageError(
                    f"{file}: is {what}; put the files themselves there, or --exclude it"
                )
            found[below] = file
    if not found:
        raise UsageError(f"{path}: has no file that --include and --exclude leave to push")
    return found


def _require_utf8(file: Path, below: str) -> None:
    """Raises UsageError for a name that the Hub can't have. Python holds other bytes of a name as surrogates."""
    try:
        below.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{file}: the name is not UTF-8, so the Hub can't have the file; rename it, or --exclude it"
        ) from error


def _refuse_unreadable(error: OSError) -> None:
    raise UsageError(
        f"{error.filename}: can't be read: {error.strerror}; change its permissions"
    ) from error


def _is_asked_for(name: str, options: PushOptions) -> bool:
    included = not options.include or any(fnmatch(name, pattern) for pattern in options.include)
    return included and not is_excluded(name, options)


def is_excluded(name: str, options: PushOptions) -> bool:
    """True if --exclude leaves out a path."""
    return any(fnmatch(name, pattern) for pattern in options.exclude)


def hashes_of_file(file: Path) -> Hashes:
    size = file.stat().st_size
    sha256, blob = hashlib.sha256(), _git_hash(size)
    with file.open("rb") as content:
        while block := content.read(_READ):
            sha256.update(block)
            blob.update(block)
    return Hashes(size, sha256.hexdigest(), blob.hexdigest())


def hashes_of_content(content: bytes) -> Hashes:
    blob = _git_hash(len(content))
    blob.update(content)
    return Hashes(len(content), hashlib.sha256(content).hexdigest(), blob.hexdigest())


def _git_hash(size: int) -> Any:
    return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)


def arrived(entry: Any, hashes: Hashes) -> bool:
    """True if the Hub's entry of a file has its size and hash. entry: of huggingface_hub's get_paths_info."""
    if entry.lfs is not None:
        return (entry.lfs.sha256, entry.lfs.size) == (hashes.sha256, hashes.size)
    return (entry.blob_id, entry.size) == (hashes.blob_id, hashes.size)
