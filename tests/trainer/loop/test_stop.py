"""Ctrl-C: the first one saves and ends, the second one ends at once."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.loop.stop import Stop
from tests.trainer.loop.launches import LLAMA, Running, launch, train

ROOT = Path(__file__).parents[3]
ENDLESS = f"pretrain {LLAMA} --train-iters 100000"
SAVED = f"{ENDLESS} --save ckpt --resume"


def wait_until(running: Running, what: Callable[[], bool]) -> None:
    while not what():
        assert running.processes[0].is_alive(), running.logs()
        time.sleep(0.05)


def has_trained(directory: Path) -> bool:
    file = directory / "metrics.jsonl"
    return file.is_file() and file.read_text().count("\n") > 2


def interrupt(running: Running) -> None:
    """Send the signal to each worker, as torchrun does."""
    for process in running.processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)


def saved_iteration(directory: Path) -> int:
    return int((directory / "ckpt" / "latest_checkpointed_iteration.txt").read_text())


@pytest.mark.parametrize("size", [1, 2])
def test_the_first_ctrl_c_saves_and_ends_with_status_0(size: int, tmp_path: Path) -> None:
    running = launch(tmp_path, size, SAVED)
    wait_until(running, lambda: has_trained(tmp_path))
    interrupt(running)
    assert running.wait() == [0] * size, running.logs()
    said = "Ctrl-C: the run saves after this step and ends; Ctrl-C again ends it at once, without saving"
    assert running.logs().count(said) == 1
    assert "ending as asked by Ctrl-C" in running.log(0)
    stopped = saved_iteration(tmp_path)
    again = train(tmp_path, size, f"{SAVED} --exit-duration-in-mins 0")
    assert f"continuing after step {stopped}" in again.log(0)


def test_ctrl_c_in_a_run_without_save_says_what_becomes_of_it(tmp_path: Path) -> None:
    running = launch(tmp_path, 1, ENDLESS)
    wait_until(running, lambda: has_trained(tmp_path))
    interrupt(running)
    assert running.wait() == [0], running.logs()
    assert (
        "Ctrl-C: the run ends after this step (no --save); Ctrl-C again ends it at once"
        in running.log(0)
    )


def hangs(where: str, rank: int) -> None:
    """Let a rank hang in the second step, or in a save."""
    from megatron_lite.checkpoint.saver import Saver
    from megatron_lite.engine import Engine

    kind, name = (Engine, "train_step") if where == "step" else (Saver, "save")
    whole, calls = getattr(kind, name), list[int]()

    def called(*arguments: Any) -> Any:
        calls.append(1)
        if where == "save" or len(calls) == 2:
            Path(f"hangs-{rank}").touch()
            time.sleep(60)
        return whole(*arguments)

    setattr(kind, name, called)


@pytest.mark.parametrize("where", ["step", "save"])
def test_the_second_ctrl_c_ends_at_once(where: str, tmp_path: Path) -> None:
    running = launch(tmp_path, 1, f"{SAVED} --save-interval 1", partial(hangs, where))
    wait_until(running, (tmp_path / "hangs-0").exists)
    interrupt(running)
    wait_until(running, lambda: "Ctrl-C again ends it" in running.log(0))
    begun = time.monotonic()
    interrupt(running)
    assert running.wait() == [130], running.logs()
    assert time.monotonic() - begun < 5
    assert "Ctrl-C again: the run ends at once, without saving" in running.log(0)


def interrupted_at_once(rank: int) -> None:
    from megatron_lite.loop import session

    def prepare(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    session.prepare = prepare  # type: ignore[assignment]


def test_ctrl_c_before_the_first_step_ends_with_one_line(tmp_path: Path) -> None:
    running = launch(tmp_path, 1, SAVED, interrupted_at_once)
    assert running.wait() == [130]
    assert (
        running.log(0) == "megatron-lite: interrupted before the first step; nothing was trained\n"
    )
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize(
    ("arriving", "torchrun", "ends"),
    [
        ([signal.SIGINT, signal.SIGINT], False, True),
        ([signal.SIGINT, signal.SIGTERM], False, False),
        ([signal.SIGINT, signal.SIGTERM], True, True),
        ([signal.SIGTERM, signal.SIGTERM], True, False),
        ([signal.SIGTERM, signal.SIGINT], True, False),
        ([signal.SIGHUP, signal.SIGWINCH, signal.SIGINT], False, False),
    ],
)
def test_these_signals_end_a_run_at_once(
    arriving: list[int], torchrun: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun makes SIGTERM of a second Ctrl-C; a batch system that sends one asks for a save."""
    left = list[int]()
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(Stop, "_listen", lambda _: None)
    stop = Stop(speaks=False, saves=True)
    for number in arriving:
        stop.heard(number)
    assert left == ([130] if ends else [])
    assert stop.interrupted == (signal.SIGINT in arriving)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_at_torchrun_reaches_the_run(times: int, tmp_path: Path) -> None:
    script = f"from tests.trainer.loop.test_stop import slow_save\nslow_save({10 * (times - 1)})\n"
    (tmp_path / "run.py").write_text(f"{script}from megatron_lite.cli import main\nmain()\n")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "run.py",
    ]
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*torchrun, *SAVED.split()], cwd=tmp_path, stdout=log, stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
    while not has_trained(tmp_path):
        assert process.poll() is None, (tmp_path / "log.txt").read_text()
        time.sleep(0.1)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(2)
    process.wait(60)
    said = (tmp_path / "log.txt").read_text()
    if times == 1:
        assert f"step {saved_iteration(tmp_path):>6} | ending as asked by Ctrl-C" in said
    else:
        assert "Ctrl-C again: the run ends at once, without saving" in said
        assert not (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").exists()
    assert len(re.findall("^megatron-lite: Ctrl-C: ", said, re.MULTILINE)) == 1


def slow_save(seconds: float) -> None:
    from megatron_lite.checkpoint.saver import Saver

    whole = Saver.save

    def save(self: Saver, snapshot: Any) -> None:
        time.sleep(seconds)
        whole(self, snapshot)

    Saver.save = save  # type: ignore[method-assign]
