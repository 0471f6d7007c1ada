"""All or nothing: an output is written beside its target and appears there by one rename, after everything is on disk.

.ckpt.megaconv-partial/          beside the target `ckpt`
    lock                         held by the run that writes here
    journal.jsonl                what has been finished, for a run that is resumed
    journal-1.jsonl …            the same of other processes that write files of this output
    data/                        becomes `ckpt`
    replaced/                    what was `ckpt`, on its way out where names can't be exchanged

A commit is these steps, in this order:

1. Files and directories are brought to disk, and the files closed.
2. From here on signals wait.
3. The journals are removed, and that is brought to disk: what they vouch for is about to leave `data`.
4. `data` takes the place of `ckpt` (formats/renames.py), and that is brought to disk.
5. The staging directory is removed, with the former output that is in it now.

A run that is killed before step 4 leaves what was there before, and one that is killed after it the new output; whatever
the staging directory then holds the next run puts back or removes.
"""

import contextlib
import ctypes
import errno
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from stat import S_ISREG
from threading import Lock
from typing import Any

from formats import run_lock, signals
from formats.errors import CheckpointError, NotEnoughSpace, TargetExists, UnsafeContent
from formats.journal import Journal
from formats.renames import NotPutBack, appear, put_back, replace, sync_directory
from formats.run_lock import RunLock
from formats.tensor import Bytes

_SUFFIX = ".megaconv-partial"
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)  # Linux alone has it
_log = logging.getLogger("megaconv")


def _explain(error: OSError, path: Path) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NotEnoughSpace(
            f"{path}: the disk is full; free some space or choose another place, nothing was left behind"
        )
    if error.errno == errno.ELOOP:
        return UnsafeContent(f"{path}: is a link, which an output is never written through; remove it")
    return CheckpointError(f"{path}: can't be written: {error.strerror or error}")


class StagedFile:
    """An output file of known size, written by position from any thread."""

    def __init__(self, path: Path, size: int, *, keep: bool) -> None:
        self.path = path
        self._writing = Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if keep else os.O_TRUNC)
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise _explain(error, path) from error
        try:
            self._allocate(size)
        except OSError as error:
            with contextlib.suppress(CheckpointError):
                self.close()
            raise _explain(error, path) from error

    def _allocate(self, size: int) -> None:
        if not size:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, 0, size)
                return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        os.ftruncate(self._descriptor, size)

    def write(self, offset: int, data: Bytes | bytes) -> None:
        """Write contiguous bytes at their place and start them on their way to the disk."""
        view = memoryview(data) if isinstance(data, bytes) else data.data.cast("B")
        start, length = offset, len(view)
        try:
            # The kernel lets one thread at a time write a file and has others spin; here they sleep, and free a processor.
            with self._writing:
                while view:
                    count = os.pwrite(self._descriptor, view, offset)
                    view, offset = view[count:], offset + count
        except OSError as error:
            raise _explain(error, self.path) from error
        if _sync_file_range is not None and length >= 1 << 16:
            # Only a hint: with the disk busy from the first block on, the final fsync has little left to wait for.
            _sync_file_range(self._descriptor, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)

    def sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise _explain(error, self.path) from error

    def close(self) -> None:
        """May be called again, also after it failed: then the descriptor is another file's."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError as error:
                raise _explain(error, self.path) from error


class Staging:
    """The directory in which an output grows. One run at a time: a second one on the same target is refused."""

    def __init__(self, target: Path, *, overwrite: bool = False, member: int = 0) -> None:
        """Raises TargetExists when something other than an empty directory is there and overwrite is not given.

        overwrite: what is there now is replaced; what somebody else puts there later is not.
        member: which of the processes that write this output together. Number 0 opens before the others and commits
        after them; the others finish() and keep() what they have written.
        """
        self.target, self._named = Path(os.path.realpath(target)), target
        self.committed = False
        """Whether the output has taken its place."""
        self._overwrite, self._member = overwrite, member
        self._former = _occupant(self.target)
        self._require_free()
        self.root = self.target.parent / f".{self.target.name}{_SUFFIX}"
        self.data, self._aside = self.root / "data", self.root / "replaced"
        self._files: list[StagedFile] = []
        self._lock = RunLock(self.root)
        self._journal = Journal(self.root / (f"journal-{member}.jsonl" if member else "journal.jsonl"))
        self._joined = False

    def _require_free(self) -> None:
        occupant = _occupant(self.target)
        if occupant is None or (self._overwrite and occupant == self._former):
            return
        what = "was put there meanwhile" if self._overwrite else "already exists"
        raise TargetExists(f"{self._named}: {what}; choose another place, or give --overwrite to replace it")

    def open(self, plan_id: str, *, resume: bool, sizes: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
        """Make the directory, or take over what an interrupted run of the same plan left; returns its journal's entries.

        plan_id: whatever has to be equal for the finished parts of an earlier run to be of use.
        sizes: of the files, by name, that the entries vouch for; where one was lost the entries count for nothing.
        """
        try:
            if not self._member:
                self._lock.take()
                self._recover()
                self._require_free()
            self._joined = True
            return self._take_over(plan_id, resume, sizes or {})
        except NotPutBack as error:
            self.keep()
            raise CheckpointError(
                f"{self.target}: can't be put back after an interrupted run: {error.strerror}"
            ) from error
        except BlockingIOError:
            raise TargetExists(f"{self.target}: another run is writing it just now", code="target-busy") from None
        except OSError as error:
            raise _explain(error, self.root) from error

    def _recover(self) -> None:
        """Put back what a run that was killed while it replaced it had moved aside."""
        if put_back(self.data, self.target, self._aside):
            self._former = _occupant(self.target)
            _log.warning("%s: was put back, as it was before an interrupted run began to replace it", self.target)

    def _take_over(self, plan_id: str, resume: bool, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
        entries = self._journal.read() if resume else []
        again = any("plan" in entry for entry in entries[1:])  # then it is not as an earlier run left it
        plan = entries[0].get("plan") if entries else None
        if plan != plan_id or again or not self._is_sound(sizes if len(entries) > 1 else {}):
            entries = []
            if not self._member:
                self._clear()
        self.data.mkdir(exist_ok=True)
        self._journal.open(keep=bool(entries))
        if not entries:
            self.record([{"plan": plan_id}])
        return entries[1:]

    def _is_sound(self, sizes: Mapping[str, int]) -> bool:
        """Whether the files are there in their sizes, and nothing is a link to somewhere else."""
        for place, folders, files in os.walk(self.root):
            if any(Path(place, name).is_symlink() for name in (*folders, *files)):
                return False
        return all(_is_file_of(self.data / name, size) for name, size in sizes.items())

    def file(self, name: str, size: int, *, keep: bool = False) -> StagedFile:
        """A new file of the output; keep: what an earlier run wrote in it stays."""
        staged = StagedFile(self.data / name, size, keep=keep)
        self._files.append(staged)
        return staged

    def record(self, entries: list[dict[str, Any]]) -> None:
        """Append to the journal. What an entry vouches for has to be on disk before."""
        try:
            self._journal.append(entries)
        except OSError as error:
            raise _explain(error, self.root) from error

    def finish(self) -> None:
        """Bring this process's files to disk and close them: nothing is written any more."""
        for file in self._files:
            file.sync()
        for file in self._files:
            file.close()
        self._close()

    def commit(self) -> None:
        """Bring everything to disk, then let it appear. After this the target is complete; before it, untouched.

        A signal that comes too late to end it is delivered when all is done; `committed` then is true.
        """
        self.finish()
        with self._explained():
            for directory in sorted(path for path in self.data.rglob("*") if path.is_dir()):
                sync_directory(directory)
            sync_directory(self.data)
        with signals.held(), self._explained():
            self._remove_journals()
            self._take_place()
            self.committed = True
            self.discard()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except NotPutBack as error:
            self.keep()
            raise CheckpointError(f"{self.target}: can't be replaced: {error.strerror}") from error
        except OSError as error:
            raise _explain(error, self.target) from error

    def _remove_journals(self) -> None:
        for journal in self.root.glob("journal*.jsonl"):
            journal.unlink()
        sync_directory(self.root)

    def _take_place(self) -> None:
        self._require_free()
        if _occupant(self.target) is None:
            appear(self.data, self.target)
        else:
            replace(self.data, self.target, self._aside)

    def discard(self) -> None:
        """Remove the staging directory and all that is in it, unless it is another run's, or member 0 is there to do it."""
        self._close()
        if self._lock.is_held or (self._member and self._joined and self._lock.take_over()):
            self._remove()
        self._leave()

    def keep(self) -> None:
        """Leave the staging directory to a run that resumes, or to member 0."""
        self._close()
        self._leave()

    def _leave(self) -> None:
        self._joined = False
        self._lock.release()

    def _close(self) -> None:
        """Errors don't count: what has to be on disk is there."""
        for file in self._files:
            with contextlib.suppress(CheckpointError):
                file.close()
        self._files.clear()
        with contextlib.suppress(OSError):
            self._journal.close()

    def _remove(self) -> None:
        try:
            put_back(self.data, self.target, self._aside)
            try:
                self._clear()
            except OSError:  # one that comes once is no reason to leave anything
                self._clear()
        except OSError as error:
            _log.warning("%s: can't be removed: %s; the next run on %s does", self.root, error.strerror, self.target)
        else:
            self._lock.remove()

    def _clear(self) -> None:
        """Remove all but the lock."""
        for old in self.root.iterdir():
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            elif old.name != run_lock.NAME:
                old.unlink()

    def require_space(self, size: int) -> None:
        """Raises NotEnoughSpace when the file system has less than size bytes free."""
        place = next(parent for parent in self.target.parents if parent.exists())
        free = shutil.disk_usage(place).free
        if free < size:
            raise NotEnoughSpace(
                f"{self.target}: {size:,} bytes are needed, {place} has {free:,} free; choose another place"
            )


def _occupant(target: Path) -> tuple[int, int] | None:
    """What is there: None for nothing and for an empty directory, where an output may appear."""
    if any(target.iterdir()) if target.is_dir() else target.exists():
        status = target.stat()
        return status.st_dev, status.st_ino
    return None


def _is_file_of(path: Path, size: int) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return S_ISREG(status.st_mode) and status.st_size == size
