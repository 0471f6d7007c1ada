"""One run at a time in a directory: a lock on a file in it, which goes with the process that holds it.

A file, since NFS locks only what was opened for writing, which no directory can be. A run that ends removes directory and
lock while others may wait in front of them: so whoever has got a lock looks whether it still is the one that is there.
"""

import contextlib
import errno
import fcntl
import logging
import os
from pathlib import Path

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_ATTEMPTS = 100
NAME = "lock"
_log = logging.getLogger("megaconv")


class RunLock:
    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / NAME
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Also where the file system has no locks, after take()."""
        return self._descriptor is not None

    def take(self) -> None:
        """Make the directory and lock it; warns and goes on where the file system has no locks.

        Raises BlockingIOError when another run has it, OSError of ELOOP when it is a link; then it leaves nothing.
        """
        made = not self._folder.exists()
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
            if made:
                self.remove()
            raise
        raise BlockingIOError

    def take_over(self) -> bool:
        """Lock the directory if it is there and its run has gone without removing it. Where there are no locks: never."""
        try:
            return self._take_file(needed=True)
        except OSError:
            return False

    def _take_file(self, *, needed: bool) -> bool:
        """Whether this run has the lock that is there. needed: not having it is an error where there are no locks too."""
        is_ours = False
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            self._lock(self._descriptor, needed)
            is_ours = os.path.samestat(os.fstat(self._descriptor), self._path.lstat())
        except FileNotFoundError:  # the run before has just removed it
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
            _log.warning("%s: this file system has no locks; make sure that no other run writes there", self._folder)

    def release(self) -> None:
        """Let others have it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def remove(self) -> None:
        """Remove lock and directory, if nothing else is in it, in this order: from the first on it may be another run's."""
        for remove in (self._path.unlink, self._folder.rmdir):
            for _ in range(2):  # an error that comes once is no reason to leave anything
                with contextlib.suppress(OSError):
                    remove()
                    break
        self.release()
