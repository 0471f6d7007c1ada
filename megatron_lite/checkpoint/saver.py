"""Saves checkpoints atomically: a checkpoint appears complete or not at all, and the tracker is written last.

    <root>/.iter_0000010.partial/              files are written here
    <root>/iter_0000010/                       appears by one rename, after all files are on disk
    <root>/hf/                                 config.json and tokenizer, by which megaconv knows the model
    <root>/latest_checkpointed_iteration.txt   10
    <root>/best_checkpointed_iteration.txt     10, with --keep-best: that with the lowest validation loss
    <root>/deltas/                             patches of older checkpoints, with --save-delta

With `asynchronous`, a thread writes a copy while training continues. At most one save runs at a time. An error in the
thread is raised at the next step. The thread has its own process group, because collectives of two threads must not
meet in one group.
"""

import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from formats import rank_files
from formats.errors import CorruptCheckpoint
from formats.renames import sync_directory
from megatron_lite.checkpoint import rank_file
from megatron_lite.checkpoint.copies import Copies
from megatron_lite.checkpoint.deltas import Deltas, remove
from megatron_lite.checkpoint.files import write_blocks, write_common, write_file
from megatron_lite.checkpoint.snapshot import Snapshot
from megatron_lite.checkpoint.together import SaveError
from megatron_lite.processes.long_work import on_rank_0

SIDECARS = "hf"
_ITERATION = re.compile(r"iter_(\d{7,})")
_PARTIAL = re.compile(r"\.iter_\d{7,}\.partial")
_REPLACED = re.compile(r"\.iter_\d{7,}\.replaced")


@dataclass
class Saver:
    """Saves the checkpoints of one rank. All ranks make the same calls."""

    root: Path
    format: str
    """`torch_dist`, `torch`, or `adapter`."""
    rank: int
    group: dist.ProcessGroup | None
    """All ranks, on gloo, used only by the saver; None in a single process."""
    sidecars: Mapping[str, bytes]
    """Contents of the files in `hf/`, by name."""
    keep_last: int | None = None
    asynchronous: bool = False
    deltas: Deltas | None = None
    """Keeps older checkpoints as patches; None keeps them full."""
    best: int | None = None
    """The iteration that is kept as the best one, however old; None: the one that an earlier run has recorded, if any."""
    _copies: Copies = field(default_factory=Copies, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _failure: BaseException | None = field(default=None, init=False)

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint. Raises SaveError, also for an error of an earlier asynchronous save.

        With `asynchronous`, check() or finish() raises the error of this save.
        """
        self.finish()
        if not self.asynchronous:
            self._write(snapshot)
            return
        copied = snapshot.copied(self._copies)
        self._thread = threading.Thread(
            target=self._try_to_write, args=(copied,), name="save", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a save in the background, if there is one."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def finish(self) -> None:
        """Wait for the save that is in progress. Raises SaveError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def remove_partial(self) -> None:
        """Remove incomplete files of saves that failed or were killed. Does nothing on other ranks than 0."""
        if self.rank or not self.root.is_dir():
            return
        for left in self.root.iterdir():
            if _PARTIAL.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def tidy(self, newest: int) -> None:
        """Do what follows a save: a run that was killed just after its last one has not done it. Rank 0 does it.

        It waits for the save that is in progress. newest: the last iteration.
        """
        self.finish()
        if self.rank == 0:
            self._tidy(newest)

    def _try_to_write(self, snapshot: Snapshot) -> None:
        try:
            self._copies.wait()
            self._write(snapshot)
        except BaseException as error:
            self._failure = error

    def _write(self, snapshot: Snapshot) -> None:
        target = self.root / rank_files.iteration_directory(snapshot.iteration)
        try:
            self._write_to(target, snapshot)
        except CheckpointException as error:
            self.remove_partial()
            rank, (cause, _) = min(error.failures.items())
            reason = getattr(cause, "strerror", None) or cause
            raise SaveError(f"{target}: rank {rank} can't write it: {reason}") from error
        except OSError as error:
            self.remove_partial()
            raise SaveError(f"{target}: can't be written: {error.strerror or error}") from error
        except SaveError:  # of another rank
            self.remove_partial()
            raise

    def _write_to(self, target: Path, snapshot: Snapshot) -> None:
        staging = target.with_name(f".{target.name}.partial")
        if self.rank == 0:
            self._make_staging(staging)
        self._barrier()
        if self.format == "torch_dist":
            self._write_blocks(staging, snapshot)
        elif snapshot.files is not None:
            for file_name, content in snapshot.files.items():
                write_file(staging / file_name, content)
        elif snapshot.rank_file is not None:
            self._write_rank_file(staging, snapshot.rank_file)
        self._barrier()
        if self.rank == 0:
            self._publish(staging, target, snapshot)
        self._barrier()
        if self.deltas is not None:
            deltas = self.deltas
            on_rank_0(lambda: deltas.add(snapshot.iteration), self.rank, self.group)

    def _make_staging(self, staging: Path) -> None:
        """Make the directory that rank 0 later renames, and remove those that earlier runs left."""
        self.root.mkdir(parents=True, exist_ok=True)
        for left in self.root.iterdir():
            if _PARTIAL.fullmatch(left.name) or _REPLACED.fullmatch(left.name):
                shutil.rmtree(left)
        staging.mkdir()

    def _write_blocks(self, directory: Path, snapshot: Snapshot) -> None:
        """Write this rank's blocks, and on rank 0 the values next to them. Collective."""
        save_id = write_blocks(directory, snapshot.shards, snapshot.objects or {}, self.group)
        if self.rank == 0:
            write_common(directory, snapshot.common, save_id)

    def _write_rank_file(self, staging: Path, file: rank_file.RankFile) -> None:
        """Write this rank's file, if it has one. Collective."""
        if file.path is None:
            rank_file.write(staging, file, self.rank, self.group)
            return
        directory = (staging / file.path).parent
        directory.mkdir()
        rank_file.write(staging, file, self.rank, self.group)
        sync_directory(directory)

    def _publish(self, staging: Path, target: Path, snapshot: Snapshot) -> None:
        sync_directory(staging)
        aside = target.with_name(f".{target.name}.replaced")
        if target.exists():
            # An earlier run wrote this iteration: it was killed before it wrote the tracker, or this run repeats it.
            target.rename(aside)
        staging.rename(target)
        sync_directory(self.root)
        shutil.rmtree(aside, ignore_errors=True)
        for name, content in self.sidecars.items():
            self._put(f"{SIDECARS}/{name}", content)
        self._put(rank_files.TRACKER, str(snapshot.iteration).encode())
        self._tidy(snapshot.iteration)

    def holds(self, iteration: int) -> bool:
        """Return whether an iteration is saved whole."""
        return (self.root / rank_files.iteration_directory(iteration)).is_dir()

    def _tidy(self, newest: int) -> None:
        """Write which iteration is the best, and remove those beyond --keep-last. Only rank 0 does. newest: the last one."""
        if self.best is not None:
            self._put(rank_files.BEST, str(self.best).encode())
        self._prune(newest)

    def _put(self, name: str, content: bytes) -> None:
        """Write a small file. name: its path below the root."""
        _replace(self.root / name, content)

    def _prune(self, newest: int) -> None:
        """Delete the oldest iterations beyond --keep-last. newest: the last iteration."""
        if self.keep_last is None:
            return
        older: list[int] = []
        for path in self.root.iterdir():
            number = number_of(path.name)
            if number is not None and number < newest:
                older.append(number)
        for number in self._too_many(older):
            remove(self.root / rank_files.iteration_directory(number))

    def _too_many(self, older: Iterable[int]) -> list[int]:
        """Return the iterations beyond --keep-last. older: all iterations before the last one."""
        assert self.keep_last is not None
        ordered = sorted(older)
        first_kept = max(0, len(ordered) + 1 - self.keep_last)
        best = self.recorded_best() if self.best is None else self.best
        return [number for number in ordered[:first_kept] if number != best]

    def recorded_best(self) -> int | None:
        """Return the best iteration that a run has recorded; None if there is none."""
        try:
            word = self._get(rank_files.BEST)
        except OSError:
            return None
        return int(word) if word.isdigit() else None

    def _get(self, name: str) -> bytes:
        """Return the content of a small file. Raises FileNotFoundError."""
        return (self.root / name).read_bytes()

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)


def _replace(path: Path, content: bytes) -> None:
    """Replace a small file by a rename, so that readers always find a complete file."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    write_file(new, content)
    new.rename(path)
    sync_directory(path.parent)


def number_of(name: str) -> int | None:
    """The number in the name of an iteration's directory; None for any other name."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None


def has_checkpoint(root: Path) -> bool:
    """Return whether a run has saved a complete checkpoint under `root`.

    The tracker proves it, because it is written last. A copy may lack the tracker, and so may a run that was killed just
    before it was written. Then the only iteration proves it, because it appears by one rename.
    Raises CorruptCheckpoint for several iterations without a tracker: a new run would replace them.
    """
    if not root.is_dir():
        return False
    if (root / rank_files.TRACKER).is_file() or rank_files.find_version(root) is not None:
        return True
    iterations = sorted(each.name for each in root.iterdir() if rank_files.is_version(each.name))
    if iterations:
        raise CorruptCheckpoint(
            f"{root}: has {', '.join(iterations[-3:])}, but no {rank_files.TRACKER}, which says the last one; "
            "write its number into this file, or give another directory"
        )
    return False
