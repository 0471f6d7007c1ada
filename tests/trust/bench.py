"""The working place of every attack: the checkpoints, a folder that is empty at the start of each case, and random
numbers."""

import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.trust import server
from tests.trust.checkpoints import PATCHES, SAVERS, SOURCES, Checkpoint
from tests.trust.judging import state


@dataclass(eq=False)
class Bench:
    """The working place of one worker process."""

    root: Path
    seed: int
    worker: int
    checkpoints: Mapping[str, Checkpoint]
    keep: bool = False
    """Leave a case's folder as it is at the end, to look at."""
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.root / f"worker-{self.worker}"

    def random(self, attack: str, number: int) -> random.Random:
        """The same for the same seed, attack and number of a case."""
        return random.Random(f"{self.seed} {attack} {number}")

    def fresh_folder(self) -> Path:
        if self.folder.is_dir():
            _make_removable(self.folder)
            shutil.rmtree(self.folder)
        self.folder.mkdir()
        return self.folder

    def copy(self, name: str, into: str = "source") -> Path:
        """A checkpoint that the case may damage."""
        return Path(shutil.copytree(self.checkpoints[name].path, self.folder / into))

    def source(self, kind: str) -> Path:
        """The checkpoint of which a kind of output is made."""
        return self.checkpoints[SOURCES.get(kind, "hf")].path

    def words(
        self, kind: str, target: Path, options: str = "", *, source: str = "hf"
    ) -> list[object]:
        """The command that makes a kind of output, one of SAVERS and PATCHES.

        source: `other` for an output that the kind's own output replaces.
        """
        if kind not in PATCHES:
            place = self.source(kind) if source == "hf" else self.checkpoints[source].path
            return command(place, target, SAVERS[kind], options)
        old, new = self.checkpoints["hf"].path, self.checkpoints["other"].path
        if source == "other":
            old, new = new, old
        second = new if kind == "delta" else self.output(source, "delta").path
        return [kind, old, second, "--save-dir", target, "--workers", 1, *options.split()]

    @cache  # noqa: B019  (a bench lives as long as its process)
    def output(self, source: str, kind: str) -> "Output":
        """The output of a command that nothing disturbs."""
        place = self.root / f"outputs-{self.worker}" / f"{source}-to-{kind}"
        place.parent.mkdir(exist_ok=True)
        done = server.run(*self.words(kind, place, source=source), folder=self.root)
        assert done.status == 0, done.err
        return Output(place, state(place))


class Output(NamedTuple):
    path: Path
    files: Mapping[str, str]
    """Each one's hash, by name."""


def command(source: Path, target: Path, saver: str, options: str = "") -> list[object]:
    """A conversion by one worker thread, whose calls come in the same order every time."""
    words = f"{saver} {options}".split()
    return ["convert", "--load-dir", source, "--save-dir", target, "--workers", 1, *words]


def _make_removable(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink() and not os.access(path, os.W_OK | os.X_OK):
            path.chmod(0o700)
