"""Keeps a run's older checkpoints as patches: one full checkpoint of every N, and what changed since the one before.

    <root>/iter_0000010/             a full checkpoint that later patches begin from
    <root>/deltas/iter_0000020/      the patch that makes 20 of 10
    <root>/deltas/iter_0000030/      the patch that makes 30 of 20
    <root>/iter_0000030/             the newest checkpoint is always full, so that a run resumes as without patches

A full checkpoint is removed only after the patch that makes it is complete on the disk, and only when a newer full one
exists. A run that is killed anywhere therefore loses nothing. The next save then begins a new chain, if it has to.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from formats import rank_files
from formats.staging import Staging
from megaconv.engine.opening import open_source
from megaconv.engine.plan import default_workers
from megaconv.input import find_input
from megaconv.model.ir import Source
from megaconv.options import LoadOptions
from megaconv.patches.blocks import zstandard
from megaconv.patches.making import make_patch

DIRECTORY = "deltas"
_ITERATION = re.compile(r"iter_(\d{7,})")
_LEFT = re.compile(r"\.iter_\d{7,}\.megaconv-partial")


@dataclass(frozen=True)
class Deltas:
    """The patches of one run. Only rank 0 uses it."""

    root: Path
    full_every: int
    """One checkpoint of so many stays full."""

    def __post_init__(self) -> None:
        """Raises UsageError if zstandard isn't installed."""
        zstandard()

    def add(self, iteration: int) -> None:
        """Make the patch of a checkpoint that is complete on the disk, and remove full ones that have a patch.

        Raises CheckpointError if the patch can't be written; all checkpoints then stay.
        """
        self._clear_leftovers()
        fulls = [each for each in _iterations(self.root) if each < iteration]
        if fulls and self._chain_length(fulls) + 1 < self.full_every:
            self._make(fulls[-1], iteration)
        self._remove_redundant(fulls)

    def _chain_length(self, fulls: list[int]) -> int:
        """The number of patches between the newest of some full checkpoints and the full one that they begin from."""
        patches = _iterations(self.root / DIRECTORY)
        begin = max((each for each in fulls if each not in patches), default=0)
        return sum(begin < each <= fulls[-1] for each in patches)

    def _make(self, before: int, after: int) -> None:
        options = LoadOptions()
        old, new = (self._source(each, options) for each in (before, after))
        target = self.root / DIRECTORY / rank_files.iteration_directory(after)
        target.parent.mkdir(exist_ok=True)
        workers = default_workers(writing=False)
        staging = Staging(target, overwrite=True)
        make_patch(old, new, staging, options=options, workers=workers)

    def _source(self, iteration: int, options: LoadOptions) -> Source:
        path = self.root / rank_files.iteration_directory(iteration)
        return open_source(find_input(path, None, options), options)

    def _remove_redundant(self, fulls: list[int]) -> None:
        patches = _iterations(self.root / DIRECTORY)
        for each in fulls:
            if each in patches:
                remove(self.root / rank_files.iteration_directory(each))

    def _clear_leftovers(self) -> None:
        """Remove what a killed run has left of a patch. No other run writes here: this one holds the directory."""
        directory = self.root / DIRECTORY
        for path in directory.iterdir() if directory.is_dir() else ():
            if _LEFT.fullmatch(path.name):
                shutil.rmtree(path)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. It loses its name first: a run that is killed here leaves no partial one under a valid name."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.replaced")
    checkpoint.rename(hidden)
    shutil.rmtree(hidden)


def _iterations(directory: Path) -> list[int]:
    """The iterations of the checkpoints or patches in a directory, in ascending order."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _ITERATION.fullmatch(name)))
