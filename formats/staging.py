"""Writes an output completely or not at all. Files are written to a directory next to the target, and one rename puts
them in place.

.ckpt.megaconv-partial/          next to the target `ckpt`
    lock                         held by the run that writes here
    journal.jsonl                the finished parts, for a run that resumes
    journal-1.jsonl …            the same, of other processes that write files of this output
    probe/                       exists briefly, to check that directories can be renamed here
    data/                        becomes `ckpt`
    replaced/                    the old `ckpt`, if the file system can't exchange names

A commit has these steps, in this order:

1. Bring files and directories to disk, and close the files.
2. Delay signals from here on.
3. Remove the journals, and bring that to disk: the data that they describe is about to leave `data`.
4. Put `data` in the place of `ckpt` (formats/renames.py), and bring that to disk.
5. Remove the staging directory, which now contains the old output.

A run that is killed before step 4 leaves the old output. A run that is killed after step 4 leaves the new output. The
next run restores or removes the content of the staging directory.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any

from formats import run_lock, signals
from formats.errors import CheckpointError, NotEnoughSpace, TargetExists
from formats.growing_file import GrowingDiskFile
from formats.journal import Journal, changes, warn_of_discarded
from formats.output import Unwritten
from formats.renames import (
    CannotRename,
    NotPutBack,
    appear,
    put_back,
    replace,
    require_renames,
    sync_directory,
)
from formats.run_lock import RunLock
from formats.staged_file import StagedFile, write_error

_SUFFIX = ".megaconv-partial"
_PROBE = "probe"
_log = logging.getLogger("megaconv")


class Staging:
    """The directory in which an output grows. Only one run at a time may use it; a second run on the same target is
    refused."""

    journal_pause = 1.0

    def __init__(self, target: Path, *, overwrite: bool = False, member: int = 0) -> None:
        """Raises TargetExists if the target is anything but an empty directory, unless overwrite is given.

        overwrite: replace the content that exists now, but not content that somebody else puts there later.
        member: number of this process among those that write the output together. Number 0 opens first and commits
        last. The others call finish() and keep().
        """
        self.target, self._named = Path(os.path.realpath(target)), target
        self.committed = False
        """True after the output has taken its place."""
        self._overwrite, self._member = overwrite, member
        self._former = _occupant(self.target)
        self._require_free()
        self.root = self.target.parent / f".{self.target.name}{_SUFFIX}"
        self.data, self._aside = self.root / "data", self.root / "replaced"
        self._files: list[StagedFile] = []
        self._lock = RunLock(self.root)
        self._journal = Journal(
            self.root / (f"journal-{member}.jsonl" if member else "journal.jsonl")
        )
        self._joined = False

    def _require_free(self) -> None:
        occupant = _occupant(self.target)
        if self._overwrite and run_lock.is_in_use(self.target):
            raise TargetExists(
                f"{self._named}: a training run saves there just now; wait until it has ended, or choose another place",
                code="target-busy",
            )
        if occupant is None or (self._overwrite and occupant == self._former):
            return
        what = "was put there meanwhile" if self._overwrite else "already exists"
        raise TargetExists(
            f"{self._named}: {what}; choose another place, or give --overwrite, which replaces a checkpoint"
        )

    def open(
        self, plan: Mapping[str, str], *, resume: bool, sizes: Mapping[str, int] | None = None
    ) -> list[dict[str, Any]]:
        """Make the directory, or take over the work of an interrupted run with the same plan. Returns its journal
        entries.

        plan: everything that has to be equal for the finished parts of an earlier run to be valid, by names that users
        understand.
        sizes: the sizes of the files that the entries describe, by name. If one is missing, all entries are discarded.
        """
        try:
            if not self._member:
                self._lock.take()
                self._recover()
                self._require_free()
                require_renames(self.root / _PROBE, self.target)
            self._joined = True
            return self._take_over(dict(plan), resume, sizes or {})
        except NotPutBack as error:
            self.keep()
            raise CheckpointError(
                f"{self.target}: can't be put back after an interrupted run: {error.strerror}"
            ) from error
        except CannotRename as error:
            what = f"directories can't be renamed there ({error.strerror}), which is how an output appears"
            raise CheckpointError(
                f"{self.target}: {what}; choose a place on another file system", code="no-renames"
            ) from error
        except BlockingIOError:
            raise TargetExists(
                f"{self.target}: another run is writing it just now", code="target-busy"
            ) from None
        except OSError as error:
            raise write_error(error, self.root) from error

    def _recover(self) -> None:
        """Restore an output that a killed run had moved aside to replace it."""
        if put_back(self.data, self.target, self._aside):
            self._former = _occupant(self.target)
            _log.warning(
                "%s: was put back, as it was before an interrupted run began to replace it",
                self.target,
            )

    def _take_over(
        self, plan: dict[str, str], resume: bool, sizes: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        entries = self._journal.read() if resume else []
        if unfit := self._unfit(entries, plan, sizes):
            damaged = resume and not entries and self._journal.has_content()
            if (len(entries) > 1 or damaged) and not self._member:
                warn_of_discarded(self._named, unfit)
            entries = []
            if not self._member:
                self._clear()
        self.data.mkdir(exist_ok=True)
        self._journal.open(keep=bool(entries))
        if not entries:
            self.record([{"plan": plan}])
        return entries[1:]

    def _unfit(
        self, entries: list[dict[str, Any]], plan: dict[str, str], sizes: Mapping[str, int]
    ) -> str:
        """The reason why the entries of an earlier run can't be used; empty if they can. The first entry is the plan."""
        if not entries:
            return "its journal can't be read"
        if entries[0].get("plan") != plan:
            return changes(entries[0].get("plan"), plan)
        if any("plan" in entry for entry in entries[1:]):
            return "its journal is not as a run leaves it"
        if not self._is_sound(sizes if len(entries) > 1 else {}):
            return "its files are not as a run leaves them"
        return ""

    def _is_sound(self, sizes: Mapping[str, int]) -> bool:
        """True if all files exist in their sizes, and nothing in the directory is a link."""
        for place, folders, files in os.walk(self.root):
            if any(Path(place, name).is_symlink() for name in (*folders, *files)):
                return False
        return all(_is_file_of(self.data / name, size) for name, size in sizes.items())

    def file(
        self, name: str, size: int, *, keep: bool = False, unwritten: Unwritten | None = None
    ) -> StagedFile:
        """A new file of the output. keep: the bytes that an earlier run wrote stay in it. unwritten: not needed."""
        staged = StagedFile(self.data / name, size, keep=keep)
        self._files.append(staged)
        return staged

    def grow(self, name: str, most_bytes: int) -> GrowingDiskFile:
        """A new file of the output that grows at its end. most_bytes: not needed."""
        return GrowingDiskFile(self.data / name, write_error)

    def record(self, entries: list[dict[str, Any]]) -> None:
        """Append to the journal. The data that the entries describe has to be on disk before."""
        try:
            self._journal.append(entries)
        except OSError as error:
            raise write_error(error, self.root) from error

    def fail(self, error: BaseException) -> None:
        """Nothing to do: no writer waits for another."""

    def readable(self) -> Path:
        """The directory in which the output grows."""
        return self.data

    def finish(self) -> None:
        """Bring this process's files to disk and close them. Nothing is written after this call."""
        for file in self._files:
            file.sync()
        for file in self._files:
            file.close()
        self._close()

    def commit(self) -> None:
        """Bring everything to disk, then put the output in place. Before this call the target is untouched, after it
        complete.

        A signal that arrives too late to stop the commit is delivered at its end; `committed` is then true.
        """
        self.finish()
        with self.write_errored():
            for directory in sorted(path for path in self.data.rglob("*") if path.is_dir()):
                sync_directory(directory)
            sync_directory(self.data)
        with signals.held(), self.write_errored():
            self._remove_journals()
            self._take_place()
            self.committed = True
            self.discard()

    @contextlib.contextmanager
    def write_errored(self) -> Iterator[None]:
        try:
            yield
        except NotPutBack as error:
            self.keep()
            raise CheckpointError(f"{self.target}: can't be replaced: {error.strerror}") from error
        except OSError as error:
            raise write_error(error, self.target) from error

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

    def discard(self) -> bool:
        """Remove the staging directory and its content, unless another run owns it or member 0 will do it. Returns True."""
        self._close()
        if self._lock.is_held or (self._member and self._joined and self._lock.take_over()):
            self._remove()
        self._leave()
        return True

    def keep(self) -> None:
        """Leave the staging directory to a run that resumes, or to member 0."""
        self._close()
        self._leave()

    def _leave(self) -> None:
        self._joined = False
        self._lock.release()

    def _close(self) -> None:
        """Close all files. Errors are ignored: the data that has to be on disk is there already."""
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
            except OSError:  # an error that occurs once is no reason to leave anything
                self._clear()
        except OSError as error:
            _log.warning(
                "%s: can't be removed: %s; the next run on %s does",
                self.root,
                error.strerror,
                self.target,
            )
        else:
            self._lock.remove()

    def _clear(self) -> None:
        """Remove everything except the lock."""
        for old in self.root.iterdir():
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            elif old.name != run_lock.NAME:
                old.unlink()

    def require_space(self, size: int) -> None:
        """Raise NotEnoughSpace if the file system has less than `size` bytes free."""
        place = next(parent for parent in self.target.parents if parent.exists())
        free = shutil.disk_usage(place).free
        if free < size:
            raise NotEnoughSpace(
                f"{self.target}: {size:,} bytes are needed, {place} has {free:,} free; choose another place"
            )


def _occupant(target: Path) -> tuple[int, int] | None:
    """(device, inode) of the target. None for no target and for an empty directory: an output may appear there."""
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
