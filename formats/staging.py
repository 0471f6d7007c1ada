"""All or nothing: an output is written beside its target and appears there by one rename, after everything is on disk.

.ckpt.megaconv-partial/          beside the target `ckpt`
    journal.jsonl                what has been finished, for a run that is resumed
    journal-1.jsonl …            the same of other processes that write files of this output
    data/                        becomes `ckpt`
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from formats.errors import CheckpointError, NotEnoughSpace, TargetExists
from formats.tensor import Bytes

_SUFFIX = ".megaconv-partial"
_AT_FDCWD, _RENAME_EXCHANGE, _SYNC_FILE_RANGE_WRITE = -100, 2, 2
_libc = ctypes.CDLL(None, use_errno=True)
_sync_file_range = getattr(_libc, "sync_file_range", None)  # Linux alone has these two
_renameat2 = getattr(_libc, "renameat2", None)


def _explain(error: OSError, path: Path) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NotEnoughSpace(
            f"{path}: the disk is full; free some space or choose another place, nothing was left behind"
        )
    return CheckpointError(f"{path}: can't be written: {error.strerror}")


class StagedFile:
    """An output file of known size, written by position from any thread."""

    def __init__(self, path: Path, size: int, *, keep: bool) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if keep else os.O_TRUNC)
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise _explain(error, path) from error
        try:
            self._allocate(size)
        except OSError as error:
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
        os.close(self._descriptor)


class Staging:
    """The directory in which an output grows. One run at a time: a second one on the same target is refused."""

    def __init__(self, target: Path, *, overwrite: bool = False, member: int = 0) -> None:
        """Raises TargetExists when something other than an empty directory is there and overwrite is not given.

        member: which of the processes that write this output together. Number 0 opens before the others and commits
        after them; the others sync() and keep() what they have written.
        """
        self.target = Path(os.path.realpath(target))
        if not overwrite and _occupied(self.target):
            raise TargetExists(f"{target}: already exists; choose another place, or give --overwrite to replace it")
        self._overwrite, self._member = overwrite, member
        self.root = self.target.parent / f".{self.target.name}{_SUFFIX}"
        self.data = self.root / "data"
        self._files: list[StagedFile] = []
        self._lock: int | None = None
        self._journal: BinaryIO | None = None

    def open(self, plan_id: str, *, resume: bool, sizes: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
        """Make the directory, or take over what an interrupted run of the same plan left; returns its journal's entries.

        plan_id: whatever has to be equal for the finished parts of an earlier run to be of use.
        sizes: of the files, by name, that the entries vouch for; where one was lost the entries count for nothing.
        """
        try:
            if not self._member:
                self.root.mkdir(parents=True, exist_ok=True)
                self._take_lock()
            return self._take_over(plan_id, resume, sizes or {})
        except BlockingIOError:
            raise TargetExists(f"{self.target}: another run is writing it just now", code="target-busy") from None
        except OSError as error:
            raise _explain(error, self.root) from error

    def _take_lock(self) -> None:
        """Raises BlockingIOError when somebody has it."""
        self._lock = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._release()
            raise

    def _take_over(self, plan_id: str, resume: bool, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
        path = self.root / (f"journal-{self._member}.jsonl" if self._member else "journal.jsonl")
        entries, valid_bytes = _read_journal(path) if resume else ([], 0)
        whole = all(
            (self.data / name).is_file() and (self.data / name).stat().st_size == size for name, size in sizes.items()
        )
        if not entries or entries[0].get("plan") != plan_id or (len(entries) > 1 and not whole):
            entries, valid_bytes = [], 0
            for old in () if self._member else self.root.iterdir():
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        self.data.mkdir(exist_ok=True)
        self._journal = path.open("ab")
        self._journal.truncate(valid_bytes)  # without the line that the interrupted run was writing
        if not entries:
            self.record([{"plan": plan_id}])
        return entries[1:]

    def file(self, name: str, size: int, *, keep: bool = False) -> StagedFile:
        """A new file of the output; keep: what an earlier run wrote in it stays."""
        staged = StagedFile(self.data / name, size, keep=keep)
        self._files.append(staged)
        return staged

    def record(self, entries: list[dict[str, Any]]) -> None:
        """Append to the journal. What an entry vouches for has to be on disk before."""
        assert self._journal is not None
        try:
            self._journal.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
            self._journal.flush()
            os.fsync(self._journal.fileno())
        except OSError as error:
            raise _explain(error, self.root) from error

    def sync(self) -> None:
        """Bring this process's files to disk."""
        for file in self._files:
            file.sync()

    def commit(self) -> None:
        """Bring everything to disk, then let it appear. After this the target is complete; before it, untouched."""
        self.sync()
        try:
            for directory in sorted(path for path in self.data.rglob("*") if path.is_dir()):
                sync_directory(directory)
            sync_directory(self.data)
            self._appear()
        except OSError as error:
            raise _explain(error, self.target) from error
        self.discard()

    def _appear(self) -> None:
        """Each way in one step that is taken back when the directory can't be brought to disk."""
        if not _occupied(self.target):
            was_there = self.target.exists()
            self.data.rename(self.target)  # replaces an empty directory too
            try:
                sync_directory(self.target.parent)
            except OSError:
                self.target.rename(self.data)
                if was_there:
                    self.target.mkdir()
                raise
        elif not self._overwrite:
            raise TargetExists(
                f"{self.target}: already exists by now; choose another place, or give --overwrite to replace it"
            )
        elif _exchange(self.data, self.target):
            try:
                sync_directory(self.target.parent)
            except OSError:
                _exchange(self.data, self.target)
                raise
        else:
            aside = self.target.with_name(f".{self.target.name}.megaconv-replaced")
            self.target.rename(aside)
            try:
                self.data.rename(self.target)
            except OSError:
                aside.rename(self.target)
                raise
            sync_directory(self.target.parent)
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink()

    def discard(self) -> None:
        """Remove the staging directory and all that is in it, unless it is another run's, or member 0 is there to do it."""
        joined = self._journal is not None
        self._close()
        if joined and self._member:
            with contextlib.suppress(OSError):
                self._take_lock()  # member 0 has gone without removing it
        if self._lock is not None:
            shutil.rmtree(self.root, ignore_errors=True)
        self._release()

    def keep(self) -> None:
        """Leave the staging directory to a run that resumes, or to member 0."""
        self._close()
        self._release()

    def _close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def require_space(self, size: int) -> None:
        """Raises NotEnoughSpace when the file system has less than size bytes free."""
        place = next(parent for parent in self.target.parents if parent.exists())
        free = shutil.disk_usage(place).free
        if free < size:
            raise NotEnoughSpace(
                f"{self.target}: {size:,} bytes are needed, {place} has {free:,} free; choose another place"
            )


def _exchange(left: Path, right: Path) -> bool:
    """Swap two names in one step; False where system or file system can't."""
    if _renameat2 is None:
        return False
    return not _renameat2(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE)


def _occupied(target: Path) -> bool:
    return any(target.iterdir()) if target.is_dir() else target.exists()


def _read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The entries, and the bytes that they take: what follows is the line that an interrupted run was writing."""
    entries: list[dict[str, Any]] = []
    valid_bytes = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not isinstance(entry, dict) or not line.endswith(b"\n"):
            break
        entries.append(entry)
        valid_bytes += len(line)
    return entries, valid_bytes


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to disk: those that a rename or a new file has put there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
