"""The ends of runs that fail, and of runs that are asked to end."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.processes.failure import report
from tests.trainer.loop.launches import LLAMA, launch, metrics, train

COMMAND = f"pretrain {LLAMA} --train-iters 500"


def reporting(rank: int) -> None:
    """Set the environment of torchrun, which gives its workers files for its own report."""
    os.environ.setdefault("TORCHELASTIC_ERROR_FILE", f"error-{rank}.json")


def at_step(step: int, victim: int, what: str, rank: int) -> None:
    """Let a step of one rank fail in the given way."""
    reporting(rank)
    from megatron_lite.engine import Engine

    whole = Engine.train_step

    def train_step(self: Engine, *arguments: Any) -> Any:
        if self.step == step:
            _misbehave(what)
        return whole(self, *arguments)

    if rank == victim:
        Engine.train_step = train_step  # type: ignore[method-assign]


def _misbehave(what: str) -> None:
    if what == "raise":
        raise ArithmeticError("a step went wrong")
    if what == "refuse":
        from megaconv.errors import CorruptCheckpoint

        raise CorruptCheckpoint("shard-3.bin: is broken; copy it again")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        sys.exit(0)


EXPECTED = {
    "raise": "rank {victim} (tp 0 pp {victim} dp 0): ArithmeticError: a step went wrong",
    "refuse": "rank {victim} (tp 0 pp {victim} dp 0): shard-3.bin: is broken; copy it again",
    "kill": "lost the connection to another rank, which ended without a message (was it killed?)",
    "exit": "lost the connection to another rank, which ended without a message (was it killed?)",
}


def fail(directory: Path, size: int, words: str, step: int, victim: int, what: str) -> None:
    running = launch(directory, size, f"{COMMAND} {words}", partial(at_step, step, victim, what))
    running.processes[victim].join(90)
    failed = time.monotonic()
    statuses = running.wait()
    assert time.monotonic() - failed < 10, running.logs()
    own = {"raise": 1, "refuse": 3, "kill": -9, "exit": 0}[what]
    assert statuses == [own if rank == victim else 1 for rank in range(size)], running.logs()
    said = re.findall(r"^megatron-lite: error: (.*)$", running.logs(), re.MULTILINE)
    assert len(said) == 1, running.logs()
    assert said[0].endswith(EXPECTED[what].format(victim=victim))
    (for_torchrun,) = directory.glob("error-*.json")
    assert json.loads(for_torchrun.read_text())["message"]["message"] == said[0]


@pytest.mark.parametrize(
    ("what", "victim"), [("raise", 1), ("kill", 0), ("exit", 1), ("refuse", 0)]
)
def test_a_rank_that_ends_ends_the_run_with_one_report_of_the_cause(
    what: str, victim: int, tmp_path: Path
) -> None:
    fail(tmp_path, 2, "--pipeline-model-parallel-size 2", 2, victim, what)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raise", "kill", "exit", "refuse"])
@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@pytest.mark.parametrize("step", [0, 3])
def test_any_rank_may_fail_at_any_step_in_any_way(
    what: str, victim: int, step: int, tmp_path: Path
) -> None:
    fail(
        tmp_path,
        4,
        "--pipeline-model-parallel-size 4 --save ckpt --save-interval 1 --async-save",
        step,
        victim,
        what,
    )


def test_sigterm_to_one_rank_saves_and_ends_all_with_status_0_and_the_run_goes_on_later(
    tmp_path: Path,
) -> None:
    command = (
        f"pretrain {LLAMA} --train-iters 100000 --save ckpt --resume --tensor-model-parallel-size 2"
    )
    running = launch(tmp_path, 2, command)
    while (
        not (tmp_path / "metrics.jsonl").is_file()
        or len((tmp_path / "metrics.jsonl").read_text()) < 500
    ):
        assert running.processes[0].is_alive(), running.logs()
        time.sleep(0.1)
    running.terminate(1)
    assert running.wait() == [0, 0], running.logs()
    assert "ending as asked by SIGTERM" in running.log(0)
    stopped = int((tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text())
    assert "saved to ckpt" in running.log(0)
    again = train(tmp_path, 2, f"{command} --exit-duration-in-mins 0")
    assert f"continuing after step {stopped}" in again.log(0)
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == str(stopped + 1)


def test_a_loss_that_is_no_number_ends_the_run_with_one_line(tmp_path: Path) -> None:
    command = (
        f"pretrain {LLAMA} --train-iters 20 --lr 1e38 --clip-grad 0 --lr-warmup-iters 0".replace(
            "--lr 1e-3 ", ""
        )
    )
    running = launch(tmp_path / "stops", 2, f"{command} --pipeline-model-parallel-size 2")
    assert running.wait() == [1, 1], running.logs()
    errors = [line for line in running.logs().splitlines() if "error" in line]
    assert len(errors) == 1
    assert re.search(
        r"step \d+: the (loss|norm of the gradients) is (nan|inf|-inf); lower --lr", errors[0]
    )
    train(tmp_path / "goes on", 1, f"{command} --no-check-for-nan-in-loss-and-grad")
    assert len(metrics(tmp_path / "goes on")) == 20


@pytest.mark.parametrize(
    ("words", "size", "message"),
    [
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 2, "2 x 2 = 4"),
        ("--load missing", 2, "missing"),
        ("--global-batch-size 3", 2, "a multiple of 1 x 2 = 2"),
        ("--distributed-backend nccl", 2, "needs a GPU for each of the 2 processes"),
        ("--tensorboard-dir /dev/null/events", 1, "/dev/null/events"),
    ],
)
def test_a_mistake_is_reported_once_by_rank_0_and_ends_all(
    words: str, size: int, message: str, tmp_path: Path
) -> None:
    running = launch(tmp_path, size, f"{COMMAND} {words}")
    statuses = running.wait()
    assert min(statuses) == max(statuses) >= 1, running.logs()
    said = re.findall(r"^megatron-lite: error: (.*)$", running.logs(), re.MULTILINE)
    assert len(said) == 1, running.logs()
    assert message in said[0]
    assert "Traceback" not in running.logs()


def test_a_full_disk_is_an_error_of_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert report(OSError(errno.ENOSPC, "No space left on device"), "rank 0", None) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("megatron-lite: error: rank 0: [Errno 28] No space left on device; make")


def test_a_reader_that_closes_the_output_ends_the_run_with_one_line(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = f"pretrain {LLAMA} --train-iters 2".split()
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_lite", *words],
        cwd=tmp_path,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    os.close(writer)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "megatron-lite: error: standard output was closed, as by `| head`; write it to a file to keep the run alive"
    ]


def ended_by_torchrun(rank: int) -> None:
    """torchrun sends SIGTERM to the others as soon as one rank has failed."""
    import threading

    from megatron_lite.processes import failure

    reporting(rank)
    failure.HEAD_START_S = 0.2
    threading.Timer(60, os._exit, [99]).start()


def test_a_mistake_is_left_to_torchruns_report_by_one_rank_while_others_wait(
    tmp_path: Path,
) -> None:
    running = launch(tmp_path, 2, f"{COMMAND} --global-batch-size 3", ended_by_torchrun)
    while all(process.is_alive() for process in running.processes):
        time.sleep(0.05)
    (waiting,) = (rank for rank, process in enumerate(running.processes) if process.is_alive())
    running.terminate(waiting)
    statuses = running.wait()
    assert statuses == [0 if rank == waiting else 2 for rank in range(2)], running.logs()
    assert "error" not in running.logs()
    (for_torchrun,) = tmp_path.glob("error-*.json")
    assert "a multiple of 1 x 2 = 2" in json.loads(for_torchrun.read_text())["message"]["message"]


@pytest.mark.parametrize("asynchronous", ["", pytest.param("--async-save", marks=pytest.mark.slow)])
def test_ranks_whose_launcher_is_killed_end_with_one_line(
    tmp_path: Path, asynchronous: str
) -> None:
    words = f"{COMMAND} --train-iters 100000 --tensor-model-parallel-size 2 --save ckpt --save-interval 5 {asynchronous}"
    running = launch(tmp_path / "run", 2, words, soon_lost)
    tracker = tmp_path / "run" / "ckpt" / "latest_checkpointed_iteration.txt"
    while not tracker.is_file() and all(process.is_alive() for process in running.processes):
        time.sleep(0.05)
    killed = time.monotonic()
    running.store = None
    assert running.wait() == [1, 1], running.logs()
    assert time.monotonic() - killed < 20
    reported = [line for line in running.logs().splitlines() if "error" in line]
    assert len(reported) == 1, running.logs()
    assert "the store of the rendezvous" in reported[0]
    assert "Traceback" not in running.logs()
    train(
        tmp_path / "run",
        2,
        f"{COMMAND} --tensor-model-parallel-size 2 --train-iters 100000 --save ckpt --resume --exit-interval 2",
    )


def soon_lost(rank: int) -> None:
    from megaconv.engine import store_watch

    store_watch.SILENT_SECONDS = 1.0


ALONE = """
from megaconv.engine import store_watch
from megatron_lite.cli import main
store_watch.SILENT_SECONDS = 0.5
main()
"""


def start_without_store(directory: Path, minutes: str, **environment: str) -> tuple[int, str]:
    """Start a rank of two whose rendezvous has no store. Returns the exit status and stderr."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    variables = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    words = f"{COMMAND} --tensor-model-parallel-size 2 --distributed-timeout-minutes {minutes}"
    ended = subprocess.run(
        [sys.executable, "-c", ALONE, *words.split()],
        cwd=directory,
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return ended.returncode, ended.stderr


def test_a_launcher_that_is_killed_before_its_ranks_have_met_ends_them_with_one_line(
    tmp_path: Path,
) -> None:
    status, said = start_without_store(tmp_path, "10", TORCHELASTIC_RUN_ID="none")
    assert status == 1
    assert [line for line in said.splitlines() if "error" in line] == said.splitlines()[-1:]
    assert "was the process that started the ranks killed?" in said.splitlines()[-1]


@pytest.mark.slow
def test_ranks_of_srun_that_find_no_store_end_with_a_line_that_names_the_address(
    tmp_path: Path,
) -> None:
    status, said = start_without_store(tmp_path, "0.02")
    assert status == 1
    assert "can't connect to rank 0 at 127.0.0.1:" in said.splitlines()[-1]
    assert "MASTER_ADDR" in said.splitlines()[-1]
    assert "Traceback" not in said
