"""Training runs that are killed while they save, at every step of it; started again, they end with the same bits.

Synchronous and asynchronous saves, both formats, one process and two, of which one is killed and the other ends by itself
or is killed with it. Torch is imported in the processes that are started, not here.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from tests.runs import snapshot
from tests.trust.bench import Bench
from tests.trust.judging import Failure
from tests.trust.kills import Steps


class Run(NamedTuple):
    size: int
    words: str

    @property
    def command(self) -> str:
        from tests.trainer.loop.launches import LLAMA

        return f"pretrain {LLAMA} --train-iters 4 --save ckpt --save-interval 1 --keep-last 2 --resume {self.words}"


_KEPT = ("iter_0000003", "iter_0000004", "latest")
"""The files that must be there at the end. An older iteration may be there if it is complete."""

RUNS = [
    Run(1, "--bf16"),
    Run(1, "--bf16 --async-save"),
    Run(1, "--ckpt-format torch --async-save"),
    Run(2, "--tensor-model-parallel-size 2 --use-distributed-optimizer --async-save"),
    Run(2, "--pipeline-model-parallel-size 2 --bf16 --ckpt-format torch"),
    Run(2, "--use-distributed-optimizer --bf16 --async-save"),
]


def attack(bench: Bench, case: int) -> None:
    from tests.trainer.loop.launches import launch

    random = bench.random("trainer", case)
    run = RUNS[case % len(RUNS)]
    steps, whole = _undisturbed(bench, run)
    victim = random.randrange(run.size)
    step = random.randrange(steps)
    what = f"{run.size} processes, {run.words}: rank {victim} killed at step {step} of {steps}"
    folder = bench.fresh_folder()
    running = launch(folder, run.size, run.command, partial(_die, victim, step))
    running.processes[victim].join(90)
    if random.random() < 0.3:
        running.kill()
    _wait(running, what)
    check_logs(running, what)
    _check_tracker(folder / "ckpt", what)
    again = launch(folder, run.size, run.command)
    statuses = _wait(again, f"{what}; then again")
    if any(statuses):
        raise Failure("message", f"{what}; then again: {again.logs()[-600:]}")
    _check_checkpoints(folder / "ckpt", whole, what)


def _check_tracker(directory: Path, what: str) -> None:
    """The tracker, if there is one, names a checkpoint that is there."""
    tracker = directory / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return
    iteration = int(tracker.read_text())
    if not (directory / f"iter_{iteration:07d}").is_dir():
        raise Failure("lost", f"{what}: the tracker names a checkpoint that isn't there")


def _check_checkpoints(directory: Path, whole: Mapping[str, str], what: str) -> None:
    """The last checkpoints are there, and each one that is there is complete. whole: of the undisturbed run."""
    found = {}
    for name, content in snapshot(directory).items():
        if not _is_remainder(name):
            found[name] = content
    missing = [name for name in whole if name.startswith(_KEPT) and name not in found]
    differing = [name for name, content in found.items() if whole.get(name) != content]
    torn = [name for name in whole if name.split("/")[0] in found and name not in found]
    wrong = sorted({*missing, *differing, *torn})
    if wrong:
        names = ", ".join(wrong[:6])
        raise Failure("wrong", f"{what}: {names} differ from those of the uninterrupted run")


def _is_remainder(name: str) -> bool:
    """True for the name of something that was being written or removed at the kill. Nobody takes it for a
    checkpoint."""
    return name.startswith(".") or name.endswith(".new")


def _wait(running: object, what: str) -> list[int]:
    try:
        return running.wait()  # type: ignore[attr-defined, no-any-return]
    except AssertionError as error:
        raise Failure("hang", f"{what}: {str(error)[-600:]}") from None


def check_logs(running: object, what: str) -> None:
    logs = running.logs()  # type: ignore[attr-defined]
    if "Traceback" in logs:
        raise Failure("traceback", f"{what}: {logs[-800:]}")


def _die(victim: int, step: int, rank: int) -> None:
    """Kill a rank before a step begins."""
    if rank == victim:
        Steps(fatal=step).install()


@cache
def _undisturbed(bench: Bench, run: Run) -> tuple[int, Mapping[str, str]]:
    """(steps of the rank that has fewest, all four checkpoints)."""
    counted = _launch_undisturbed(bench, run, _count)
    steps = [(counted / f"steps-{rank}").read_text().count("\n") for rank in range(run.size)]
    return min(steps), snapshot(_launch_undisturbed(bench, run, _keep_all) / "ckpt")


def _launch_undisturbed(bench: Bench, run: Run, prepare: Callable[[str, int], None]) -> Path:
    from tests.trainer.loop.launches import launch

    folder = bench.root / f"whole-{bench.worker}"
    shutil.rmtree(folder, ignore_errors=True)
    running = launch(folder, run.size, run.command, partial(prepare, str(folder)))
    assert running.wait() == [0] * run.size, running.logs()
    return folder


def _count(folder: str, rank: int) -> None:
    reported = os.open(Path(folder) / f"steps-{rank}", os.O_WRONLY | os.O_CREAT)
    Steps(reported=reported).install()


def _keep_all(folder: str, rank: int) -> None:
    """Keep all checkpoints without a flag, because checkpoints record the flags of their run."""
    from megatron_lite.checkpoint.saver import Saver

    Saver._prune = lambda self, newest: None  # type: ignore[method-assign]
