"""The renames by which an output takes its place, each of them undone when it can't be brought to disk.

Where the file system can exchange two names, the new output and the old one change places in one step. Where it can't
(NFS and others), the old one is moved into the staging directory first. Whoever is killed between those two renames
leaves no output at all, until `put_back` is called, with which every run begins.
"""

import contextlib
import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux alone has it


class NotPutBack(OSError):
    """A replacement failed, and so did undoing it. The message says where what was there lies now."""


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to disk: those that a rename or a new file has put there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        with contextlib.suppress(OSError):  # nothing was written through it
            os.close(descriptor)


def appear(new: Path, target: Path) -> None:
    """new becomes target, where nothing is or an empty directory. Raises OSError; then all is as it was."""
    was_there = target.exists()
    new.rename(target)
    try:
        sync_directory(target.parent)
    except OSError:
        target.rename(new)
        if was_there:
            target.mkdir()
        raise


def replace(new: Path, target: Path, aside: Path) -> None:
    """new becomes target, and what was there new or aside. Raises OSError; then all is as it was, but for NotPutBack.

    aside: a free name in the directory of new.
    """
    if exchange(new, target):
        try:
            sync_directory(target.parent)
        except OSError as error:
            try:
                exchange(new, target)
            except OSError:
                what = f"{error.strerror}; it is replaced, but whether a crash would undo that is unknown"
                raise NotPutBack(
                    error.errno, f"{what}; what was there before lies at {new} until the next run"
                ) from error
            raise
        return
    target.rename(aside)
    try:
        _sync_both(aside, target)  # or else a crash of the machine could keep the second rename and lose the first
        new.rename(target)
        try:
            sync_directory(target.parent)
        except OSError:
            target.rename(new)
            raise
    except OSError:
        put_back(new, target, aside)
        raise


def put_back(new: Path, target: Path, aside: Path) -> bool:
    """Undo a replacement that was broken off between its renames. Whether there was one.

    It was broken off there if new still is where it was made. Raises NotPutBack.
    """
    if not (os.path.lexists(aside) and os.path.lexists(new)):
        return False
    try:
        if os.path.lexists(target):
            target.rmdir()  # raises unless it is an empty directory
        aside.rename(target)
    except OSError as error:
        where = f"what was there before lies at {aside}, and the next run on {target} tries again to put it back"
        raise NotPutBack(error.errno, f"{error.strerror}; {where}") from error
    _sync_both(aside, target)
    return True


def _sync_both(left: Path, right: Path) -> None:
    for directory in (left.parent, right.parent):
        sync_directory(directory)


def exchange(left: Path, right: Path) -> bool:
    """Swap two names in one step; False where system or file system can't. Raises OSError for whatever else is wrong."""
    if _renameat2 is None:
        return False
    if not _renameat2(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(left), None, str(right))
