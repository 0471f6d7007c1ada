"""One run at a time in a directory: a lock on a file in it, which ends with the process that holds it.

The lock is on a file, since NFS locks only files that are open for writing, and a directory can't be opened so. A run
that ends removes the directory and the lock while other runs may wait for the lock. Therefore a run that gets a lock
checks that its file still is the one in the directory.
"""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_ATTEMPTS = 100
NAME = "lock"
OF_A_RUN = ".lock"
"""Name of the lock file in the directory to which a training run saves."""
_log = logging.getLogger("megaconv")


class RunLock:
    def __init__(self, folder: Path, name: str = NAME) -> None:
        """name: name of the lock file. It is hidden in a directory that users look into."""
        self._folder, self._path = folder, folder / name
        self._descriptor: int | None = None
        self._made = False

    @property
    def is_held(self) -> bool:
        """True after take(), even if the file system has no locks."""
        return self._descriptor is not None

    def take(self) -> None:
        """Make the directory and lock it. If the file system has no locks, warn and continue.

        Raises BlockingIOError if another run holds the lock, and OSError with ELOOP if the directory is a link. It then
        leaves nothing behind.
        """
        self._made = not self._folder.exists()
        try:
            for _ in range(_ATTEMPTS):
                self._folder.mkdir(parents=True, exist_ok=True)
                if self._folder.is_symlink():
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if self._take_file(needed=False):
                    return
        except BlockingIOError:
            raise
        except BaseException:
            if self._made:
                self.remove()
            raise
        raise BlockingIOError

    def take_over(self) -> bool:
        """Lock the directory if it exists and its run ended without removing it. Without file locks, the result is
        always False."""
        try:
            return self._take_file(needed=True)
        except OSError:
            return False

    def _take_file(self, *, needed: bool) -> bool:
        """True if this run holds the current lock. needed: without file locks, raise an error instead of continuing
        without a lock."""
        is_ours = False
        try:
            self._descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
            )
            self._lock(self._descriptor, needed)
            # Another run may have removed this file between opening and locking it.
            is_ours = os.path.samestat(os.fstat(self._descriptor), self._path.lstat())
        except FileNotFoundError:  # the previous run has just removed it
            pass
        finally:
            if not is_ours:
                self.release()
        return is_ours

    def _lock(self, descriptor: int, needed: bool) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if needed or error.errno not in _UNSUPPORTED:
                raise
            _log.warning(
                "%s: this file system has no locks; make sure that no other run writes there",
                self._folder,
            )

    def release(self) -> None:
        """Release the lock for other runs."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def remove(self) -> None:
        """Remove the lock file, and then the directory if it is empty. After the lock file is gone, the directory may
        belong to another run."""
        self._remove(self._path.unlink, self._folder.rmdir)

    def leave(self) -> None:
        """Remove the lock file, and the directory only if take() made it and it is empty."""
        self._remove(self._path.unlink, *([self._folder.rmdir] if self._made else []))

    def _remove(self, *removals: Callable[[], None]) -> None:
        for remove in removals:
            for _ in range(2):  # an error that occurs once is no reason to leave anything
                with contextlib.suppress(OSError):
                    remove()
                    break
        self.release()


def is_in_use(folder: Path) -> bool:
    """True if a training run saves to the directory just now. Without file locks, the result is always False."""
    try:
        descriptor = os.open(folder / OF_A_RUN, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # no run has begun there, or this user can't write there
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False
