"""The renames by which an output takes its place. Each of them is undone if it can't be brought to disk.

If the file system can exchange two names, the new and the old output change places in one step. If it can't (NFS and
others), the old output is first moved into the staging directory. A run that is killed between those two renames leaves
no output at its place. Every run begins with `put_back`, which restores the old output.
"""

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES)
"""Errors of a rename to a directory with contents. SMB gives EACCES."""
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # only Linux has it


class NotPutBack(OSError):
    """A replacement failed, and so did undoing it. The message says where the old output is now."""


class CannotRename(OSError):
    """The file system can't rename directories, or can't rename the one that is to be replaced."""


def require_renames(probe: Path, target: Path) -> None:
    """Try the operations of a commit before anything is written, and leave nothing behind. Raises CannotRename or
    another OSError.

    probe: a free name, for a directory that is made and removed again. target: the path that may hold an output to
    replace.
    """
    shutil.rmtree(probe, ignore_errors=True)  # left by a run that was killed
    old, new = probe / "here" / "directory", probe / "there" / "directory"
    old.mkdir(parents=True)
    new.parent.mkdir()
    (old / "file").touch()  # some file systems on object stores can rename only empty directories
    try:
        _rename(old, new)
        if target.is_dir():
            _require_movable(target, new)
    finally:
        shutil.rmtree(probe)


def _rename(old: Path, new: Path) -> None:
    try:
        old.rename(new)
    except OSError as error:
        raise CannotRename(error.errno, error.strerror) from error


def _require_movable(target: Path, occupied: Path) -> None:
    """Check that a directory can be moved, by renaming it onto a directory that is not empty. The rename must fail.

    If the error says that the place is occupied, the directory could be moved. Any other error gives the reason why it
    can't be.
    """
    try:
        target.rename(occupied)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            raise CannotRename(error.errno, error.strerror) from error
    else:
        occupied.rename(target)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to disk, after a rename or a new file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        with contextlib.suppress(OSError):  # nothing was written through it
            os.close(descriptor)


def appear(new: Path, target: Path) -> None:
    """Rename new to target. The target must not exist, or must be an empty directory. Raises OSError after undoing
    everything."""
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
    """Rename new to target, and keep the old target as new or aside. Raises OSError after undoing everything;
    NotPutBack if that fails.

    aside: a free name in the directory of new.
    """
    if exchange(new, target):
        try:
            sync_directory(target.parent)
        except OSError as error:
            try:
                exchange(new, target)
            except OSError:
                what = f"{error.strerror}; the output is replaced, but a crash may still undo this"
                raise NotPutBack(
                    error.errno, f"{what}; the previous output is at {new} until the next run"
                ) from error
            raise
        return
    target.rename(aside)
    try:
        # Otherwise a crash of the machine could keep the second rename and lose the first.
        _sync_both(aside, target)
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
    """Undo a replacement that was interrupted between its two renames. Returns True if there was one.

    A replacement was interrupted there if new still is where it was made. Raises NotPutBack.
    """
    if not (os.path.lexists(aside) and os.path.lexists(new)):
        return False
    try:
        if os.path.lexists(target):
            target.rmdir()  # raises unless it is an empty directory
        aside.rename(target)
    except OSError as error:
        where = f"the previous output is at {aside}; the next run on {target} tries to put it back"
        raise NotPutBack(error.errno, f"{error.strerror}; {where}") from error
    _sync_both(aside, target)
    return True


def _sync_both(left: Path, right: Path) -> None:
    for directory in (left.parent, right.parent):
        sync_directory(directory)


def exchange(left: Path, right: Path) -> bool:
    """Swap two names in one step. Returns False if the system or file system can't. Raises OSError for any other error."""
    if _renameat2 is None:
        return False
    if not _renameat2(
        _AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE
    ):
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(left), None, str(right))
