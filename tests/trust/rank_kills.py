"""Conversions by several processes, of which one, all, or the launcher is killed; then the same command again.

The launcher is a process that keeps the rendezvous store, as torchrun's agent does, and forks the ranks. Torch is imported
here, in the worker, at the first case.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from formats.tensor import Box, Bytes, FileTensor
from tests.trust import server
from tests.trust.bench import Bench, command
from tests.trust.checkpoints import SAVERS
from tests.trust.judging import (
    ABSENT,
    Failure,
    check_conduct,
    check_nothing_left,
    check_one_of,
    state,
)
from tests.trust.kills import WAYS, Steps, journal_every_tensor

RANKS = 2
SECONDS = 40.0
_VICTIMS = ("launcher", "rank 0", "rank 1", "all")
_SAVERS = ("core", "torch_dist", "zarr", "hf")


def attack(bench: Bench, case: int) -> None:
    import torch.distributed  # noqa: F401  (the forked ranks have it then)

    random = bench.random("ranks", case)
    victim = _VICTIMS[case % len(_VICTIMS)]
    saver = random.choice(_SAVERS)
    way = random.choice(["fresh", "overwrite", "resume", "both"])
    replaces = "--overwrite" in WAYS[way]
    new = _expected(bench, saver)
    folder = bench.fresh_folder()
    target = folder / "out"
    logs = folder / "logs"
    logs.mkdir()
    old = ABSENT
    if replaces:
        shutil.copytree(bench.output("other", saver).path, target)
        old = state(target)
    arguments = command(bench.checkpoints["hf"].path, target, SAVERS[saver], WAYS[way])
    step = random.randrange(200)
    what = f"{saver}, {way}; {victim} killed at step {step} of rank {step % RANKS}"
    run = Launch(logs, arguments, _fatal_steps(victim, step))
    run.strike(victim)
    _judge_ends(run.outcomes(), what)
    if state(target) != new:
        check_one_of(target, (old,), what)
    shutil.rmtree(logs)
    logs.mkdir()
    again = Launch(logs, arguments, {}).outcomes()
    shown = [(outcome.status, outcome.err[-300:]) for outcome in again]
    what = f"{what}; then again: {shown}"
    _judge_ends(again, what)
    failed = any(outcome.status for outcome in again)
    exists = any("already exists" in outcome.err for outcome in again)
    rightly_refused = exists and not replaces
    if failed and not rightly_refused:
        raise Failure("message", what)
    check_one_of(target, (new,), what)
    if not exists:
        check_nothing_left(folder, ("out", "logs"), what)


class Launch:
    """Ranks of one conversion, below a launcher that keeps their store."""

    def __init__(
        self, logs: Path, arguments: list[object], faults: dict[int, Callable[[], None]]
    ) -> None:
        self._logs, self._started = logs, time.monotonic()
        self._reading, writing = os.pipe()
        self._launcher = os.fork()
        if not self._launcher:
            os.close(self._reading)
            self._launch(writing, arguments, faults)
        os.close(writing)
        self._pids = [int(word) for word in _line(self._reading).split()]

    def _launch(
        self, writing: int, arguments: list[object], faults: dict[int, Callable[[], None]]
    ) -> None:
        """Becomes the launcher, and waits for its ranks. Ends this process."""
        try:
            from torch.distributed import TCPStore

            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ranks = []
            for rank in range(RANKS):
                process = os.fork()
                if not process:
                    self._become(rank, store.port, arguments, faults.get(rank))
                ranks.append(process)
            os.write(writing, (" ".join(map(str, ranks)) + "\n").encode())
            for rank, process in enumerate(ranks):
                _, status = os.waitpid(process, 0)
                (self._logs / f"status-{rank}").write_text(str(os.waitstatus_to_exitcode(status)))
        finally:
            os._exit(0)

    def _become(
        self, rank: int, port: int, arguments: list[object], fault: Callable[[], None] | None
    ) -> None:
        status = 1
        # Inherited sockets would keep the store's connections open after the launcher is killed.
        os.closerange(3, 4096)
        try:
            os.environ |= {
                "RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
            }  # fmt: skip
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(self._logs / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
            sys.stdout, sys.stderr = (
                os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
            )
            sys.argv = ["megaconv", *map(str, arguments)]
            journal_every_tensor()
            _read_slowly(self._logs / f"reading-{rank}")
            if fault is not None:
                fault()
            status = server.call_main()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)

    def strike(self, victim: str) -> None:
        """The launcher, or all, as soon as every rank reads; a single rank kills itself."""
        if victim not in ("launcher", "all"):
            return
        until = time.monotonic() + SECONDS
        while (
            not all((self._logs / f"reading-{rank}").exists() for rank in range(RANKS))
            and time.monotonic() < until
        ):
            time.sleep(0.005)
        for process in [self._launcher] if victim == "launcher" else [self._launcher, *self._pids]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def outcomes(self) -> list[server.Outcome]:
        """The outcomes of all ranks with their output. Ranks that don't end are killed."""
        until = time.monotonic() + SECONDS
        while any(map(_alive, self._pids)) and time.monotonic() < until:
            time.sleep(0.02)
        hanging = [process for process in self._pids if _alive(process)]
        for process in hanging:
            os.kill(process, signal.SIGKILL)
        os.close(self._reading)
        os.waitpid(self._launcher, 0)
        seconds = time.monotonic() - self._started
        return [
            server.Outcome(self._status(rank), *self._said(rank), seconds, 0, process in hanging)
            for rank, process in enumerate(self._pids)
        ]

    def _status(self, rank: int) -> int:
        """-SIGKILL where the launcher didn't live to see it."""
        file = self._logs / f"status-{rank}"
        return int(file.read_text()) if file.exists() else -signal.SIGKILL

    def _said(self, rank: int) -> Iterator[str]:
        for name in ("out", "err"):
            file = self._logs / f"{name}-{rank}"
            yield file.read_text() if file.exists() else ""


def _alive(process: int) -> bool:
    """True if a process is there and no zombie. It is no child of this process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _line(descriptor: int) -> str:
    found = b""
    while not found.endswith(b"\n"):
        part = os.read(descriptor, 4096)
        if not part:
            raise RuntimeError("the launcher didn't start")
        found += part
    return found.decode()


def _fatal_steps(victim: str, step: int) -> dict[int, Callable[[], None]]:
    """The functions to run in a rank before a step begins."""
    if victim not in ("rank 0", "rank 1"):
        return {}
    return {int(victim[-1]): lambda: Steps(fatal=step).install()}


def _read_slowly(marker: Path) -> None:
    """Read slowly, so that there is time to kill a rank."""
    read_into = FileTensor.read_into

    def slowly(self: FileTensor, box: Box, out: Bytes) -> None:
        marker.touch()
        time.sleep(0.01)
        read_into(self, box, out)

    FileTensor.read_into = slowly  # type: ignore[method-assign]


def _judge_ends(outcomes: Sequence[server.Outcome], what: str) -> None:
    for rank, outcome in enumerate(outcomes):
        check_conduct(outcome, f"{what}: rank {rank}", killed=outcome.status != 0)


@cache
def _expected(bench: Bench, saver: str) -> object:
    """The output of ranks that nothing disturbs."""
    folder = bench.fresh_folder()
    (folder / "logs").mkdir()
    arguments = command(bench.checkpoints["hf"].path, folder / "out", SAVERS[saver])
    outcomes = Launch(folder / "logs", arguments, {}).outcomes()
    assert [outcome.status for outcome in outcomes] == [0] * RANKS, outcomes
    made = state(folder / "out")
    bench.fresh_folder()
    return made
