"""SIGKILL at every step at which the file system changes, and signals at random moments; then the same command again.

A step is a call that changes the file system or brings it to disk, seen from before and from after it: "after the
exchange", "before the removal". With --resume the journal is written after every tensor, so that there is something to
resume from.
"""

import ctypes
import errno
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from megaconv.engine import transfer
from megaconv.patches import blocks_file
from tests.trust import server
from tests.trust.bench import Bench
from tests.trust.checkpoints import PATCHES, SAVERS
from tests.trust.judging import (
    ABSENT,
    Failure,
    check_conduct,
    check_exists_somewhere,
    check_nothing_left,
    check_one_of,
    state,
)
from tests.trust.server import Blow

WAYS = {
    "fresh": "",
    "overwrite": "--overwrite",
    "resume": "--resume",
    "both": "--overwrite --resume",
    "verify": "--verify",
    "overwrite, no exchange": "--overwrite",
    "both, no exchange": "--overwrite --resume",
}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_STEPS = (
    "mkdir", "rename", "replace", "link", "symlink", "unlink", "remove", "rmdir", "fsync", "fdatasync", "ftruncate", "truncate",
    "pwrite",
)  # fmt: skip
_BULK = ("pwrite", "_fallocate")
"""Steps that there are many of, and that are all alike: after all others."""


class Scenario(NamedTuple):
    saver: str
    way: str

    @property
    def options(self) -> str:
        return WAYS[self.way]

    @property
    def replaces(self) -> bool:
        return "--overwrite" in self.options

    def __str__(self) -> str:
        return f"{self.saver}, {self.way}"


SCENARIOS = [
    Scenario(saver, way)
    for way in WAYS
    for saver in (*SAVERS, *PATCHES)
    if (saver, way) != ("delta", "verify")  # it has no such option
]


class Steps:
    """Counts steps in this process, from any thread, and kills it at one of them."""

    def __init__(self, fatal: int | None = None, reported: int | None = None) -> None:
        """fatal: the number of the step, from 0. reported: a descriptor that gets every step's name."""
        self._fatal, self._reported, self._count, self._lock = fatal, reported, 0, Lock()

    def install(self, *, exchange: bool = True) -> None:
        """exchange: two names can be exchanged; if not, the call fails as NFS has it fail."""
        bound_in_python_3_10 = getattr(pathlib, "_NormalAccessor", None)
        for owner in filter(None, (os, bound_in_python_3_10)):
            for name in _STEPS:
                if hasattr(owner, name):
                    call = getattr(owner, name)
                    setattr(owner, name, self._counted(name, call))
        ours = [module for name, module in sys.modules.items() if name.startswith("formats.")]
        for module in ours:
            for name, value in list(vars(module).items()):
                if isinstance(value, ctypes._CFuncPtr):  # type: ignore[attr-defined]
                    call = value if exchange or "rename" not in name else _unsupported
                    setattr(module, name, self._counted(name, call))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self._step(f"before {name}")
            result = call(*arguments, **options)
            self._step(f"after {name}")
            return result

        return counted

    def _step(self, name: str) -> None:
        with self._lock:
            if self._count == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            self._count += 1
            if self._reported is not None:
                os.write(self._reported, f"{name}\n".encode())


def journal_every_tensor() -> None:
    """Instead of every five seconds, so that there is something to resume from."""
    move = transfer.Transfer._move

    def recorded(self: transfer.Transfer, *arguments: Any) -> Any:
        self._record()
        return move(self, *arguments)

    transfer.Transfer._move = recorded  # type: ignore[method-assign]
    blocks_file.JOURNAL_SECONDS = 0


def _unsupported(*arguments: Any) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def attack(bench: Bench, number: int) -> None:
    """Every fourth case is a signal at a random moment, the others go through all steps in a random order."""
    folder = bench.fresh_folder()
    target = folder / "out"
    random = bench.random("kills", number)
    visit, place = divmod(number, len(SCENARIOS))
    scenario = SCENARIOS[place]
    steps = _steps_of(bench, scenario)
    blow, step = None, None
    if visit % 4 == 3:
        seconds = random.uniform(0, 1.2 * _seconds_of(bench, scenario))
        blow = Blow(seconds, random.choice(SIGNALS))
        name = signal.Signals(blow.number).name
        moment = f"{name} after {seconds * 1000:.1f} ms"
    else:
        earlier = visit - visit // 4
        step, name = steps[earlier % len(steps)]
        moment = f"SIGKILL at step {step}, {name}"
    what = f"{scenario}; {moment}"
    old = _put_old_output(bench, scenario, target)
    new = bench.output("hf", scenario.saver).files
    arguments = _command(bench, scenario, target)
    outcome = server.run(*arguments, folder=folder, prepare=_preparation(scenario, step), blow=blow)
    died = outcome.status < 0
    check_conduct(outcome, what, killed=died)
    _judge_target(scenario, folder, old, new, what)
    if not died:
        _judge_end(scenario, folder, outcome.status, new, what)
    _judge_repetition(scenario, folder, arguments, new, what)


def _command(bench: Bench, scenario: Scenario, target: Path) -> list[object]:
    return bench.words(scenario.saver, target, scenario.options)


def _preparation(
    scenario: Scenario, step: int | None, reported: int | None = None
) -> Callable[[], None]:
    def prepare() -> None:
        journal_every_tensor()
        Steps(step, reported).install(exchange="no exchange" not in scenario.way)

    return prepare


def _put_old_output(bench: Bench, scenario: Scenario, target: Path) -> Mapping[str, str]:
    if not scenario.replaces:
        return ABSENT
    old = bench.output("other", scenario.saver)
    shutil.copytree(old.path, target)
    return old.files


def _judge_target(
    scenario: Scenario, folder: Path, old: Mapping[str, str], new: Mapping[str, str], what: str
) -> None:
    """Old or new. Without an exchange there is a moment at which both have other names; the next start has to end it."""
    between = "no exchange" in scenario.way and not (folder / "out").exists()
    if between:
        check_exists_somewhere(folder, (old, new), what)
    else:
        check_one_of(folder / "out", (old, new), what)


def _judge_end(
    scenario: Scenario, folder: Path, status: int, new: Mapping[str, str], what: str
) -> None:
    """Judge a run that ended by itself: with exit status 0 the output is there, and without --resume nothing else
    stays."""
    if status == 0:
        check_one_of(folder / "out", (new,), what)
    elif status != 130:
        raise Failure("message", f"{what}: exit {status}")
    if status == 0 or "--resume" not in scenario.options:
        check_nothing_left(folder, ("out",), what)


def _judge_repetition(
    scenario: Scenario, folder: Path, arguments: list[object], new: Mapping[str, str], what: str
) -> None:
    """The same command once more makes what an undisturbed run makes, and tidies up."""
    target = folder / "out"
    was_complete = state(target) == new
    again = server.run(*arguments, folder=folder, prepare=_preparation(scenario, None))
    what = f"{what}; then again"
    ended = f"{what} (exit {again.status}: {again.err.strip()[-300:]})"
    check_conduct(again, what)
    check_one_of(target, (new,), ended)
    if was_complete and not scenario.replaces:
        if again.status != 2:
            raise Failure("message", f"{what}: exit {again.status} for a target that exists")
        return
    if again.status:
        raise Failure("message", f"{what}: exit {again.status}: {again.err}")
    check_nothing_left(folder, ("out",), what)


@cache
def _steps_of(bench: Bench, scenario: Scenario) -> list[tuple[int, str]]:
    """All steps of an undisturbed run, by number and name, in this seed's order; those of the commit first."""
    folder = bench.fresh_folder()
    target = folder / "out"
    _put_old_output(bench, scenario, target)
    arguments = _command(bench, scenario, target)
    reported = os.memfd_create("steps")
    outcome = server.run(*arguments, folder=folder, prepare=_preparation(scenario, None, reported))
    assert outcome.status == 0, outcome.err
    names = os.pread(reported, 1 << 20, 0).decode().splitlines()
    os.close(reported)
    bench.fresh_folder()
    steps = list(enumerate(names))
    bench.random(f"steps of {scenario}", 0).shuffle(steps)

    def is_bulk(step: tuple[int, str]) -> bool:
        return any(name in step[1] for name in _BULK)

    return sorted(steps, key=is_bulk)


@cache
def _seconds_of(bench: Bench, scenario: Scenario) -> float:
    """The seconds of an undisturbed run."""
    folder = bench.fresh_folder()
    arguments = _command(bench, scenario, folder / "out")
    outcome = server.run(*arguments, folder=folder, prepare=_preparation(scenario, None))
    bench.fresh_folder()
    return outcome.seconds
