"""The start of processes: under torchrun and srun, with and without GPUs, after a restart."""

import os
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from megaconv.errors import UsageError
from megatron_lite.processes import launch as launching
from megatron_lite.processes.failure import TrainingError
from megatron_lite.processes.interfaces import explained
from megatron_lite.processes.slurm import adopt, tasks_of_node
from megatron_lite.settings.parallel import Parallel
from tests.trainer.loop.launches import LLAMA, launch
from tests.trainer.loop.test_failing import at_step

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("words", "node", "tasks"),
    [("4", 0, 4), ("8(x2),4", 0, 8), ("8(x2),4", 1, 8), ("8(x2),4", 2, 4)],
)
def test_tasks_of_a_node_are_counted_as_slurm_writes_them(
    words: str, node: int, tasks: int
) -> None:
    assert tasks_of_node(words, node) == tasks


def _connect_in_vain(monkeypatch: pytest.MonkeyPatch, address: str, **environment: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: address)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with explained():
        raise RuntimeError("connectFullMesh failed\nstack")


def test_a_host_name_that_resolves_to_loopback_is_named_when_machines_cannot_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = r"host name node1 resolves to 127.0.1.1, .* GLOO_SOCKET_IFNAME=eth0 .*\(connectFullMesh failed\)$"
    with pytest.raises(TrainingError, match=message):
        _connect_in_vain(monkeypatch, "127.0.1.1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")


@pytest.mark.parametrize(
    ("address", "environment"),
    [
        ("10.0.0.7", {"LOCAL_WORLD_SIZE": "2"}),
        ("127.0.1.1", {"LOCAL_WORLD_SIZE": "4"}),
        ("127.0.1.1", {"LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}),
    ],
    ids=["usable name", "one machine", "named interface"],
)
def test_another_failure_to_connect_is_not_explained_by_the_host_name(
    address: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="connectFullMesh"):
        _connect_in_vain(monkeypatch, address, WORLD_SIZE="4", **environment)


def test_a_task_of_srun_gets_the_variables_of_torchrun() -> None:
    environment = {
        "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": "node1",
    }  # fmt: skip
    adopt(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environment[name] for name in names] == ["5", "6", "1", "2", "node1", "29500"]
    del environment["RANK"], environment["MASTER_ADDR"]
    with pytest.raises(UsageError, match="export MASTER_ADDR="):
        adopt(environment)


def test_one_task_and_ranks_of_torchrun_stay_what_they_are() -> None:
    for environment in (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "RANK": "0", "WORLD_SIZE": "2"},
    ):
        before = dict(environment)
        adopt(environment)
        assert environment == before


def as_srun(port: int, step: int | None, rank: int) -> None:
    """Set the environment of a task of srun. step: at this step rank 0 fails."""
    for name in [
        name
        for name in os.environ
        if name.startswith(("TORCHELASTIC", "RANK", "LOCAL_", "WORLD", "MASTER"))
    ]:
        del os.environ[name]
    os.environ |= {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "MASTER_PORT": str(port),
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0",
    }  # fmt: skip
    if step is not None:
        at_step(step, 0, "raise", rank)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("fails_at", [None, 1])
def test_srun_needs_no_torchrun(fails_at: int | None, tmp_path: Path) -> None:
    """This also holds if rank 0 fails: another process keeps the store that records the first failure."""
    running = launch(
        tmp_path, 2, f"pretrain {LLAMA} --train-iters 2", partial(as_srun, free_port(), fails_at)
    )
    assert running.wait() == ([0, 0] if fails_at is None else [1, 1]), running.logs()
    assert "2 x cpu, gloo; TP 1, PP 1, DP 2" in running.log(0).splitlines()[0]
    said = re.findall(r"^megatron-lite: error: (.*)$", running.logs(), re.MULTILINE)
    assert said == (
        [] if fails_at is None else ["rank 0 (tp 0 pp 0 dp 0): ArithmeticError: a step went wrong"]
    )


def test_fewer_gpus_than_processes_are_an_error_not_a_run_on_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UsageError, match="a GPU for each of the 2 processes of a machine, found 1"):
        launching._device(Parallel())
    assert launching._device(Parallel(distributed_backend="gloo")).type == "cpu"
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "h100:1")
    assert launching._device(Parallel()) == torch.device("cuda", 0)


def last_lines(report: str) -> list[str]:
    """The last lines of torchrun's report, without the borders."""
    return [line.strip() for line in report.splitlines() if line.strip().strip("=-")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param("--num-layer 4", "unknown flag --num-layer; did you mean --num-layers?", id="before ranks meet"),
        pytest.param(
            f"{LLAMA} --train-iters 2 --tp 3", "2 processes can't be divided over tp x pp = 3 x 1 = 3; start a multiple of 3",
            id="after they met", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_torchrun_ends_with_one_report_of_a_mistake(
    words: str, message: str, tmp_path: Path
) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    ran = subprocess.run(
        [*torchrun, "-m", "megatron_lite", "pretrain", *words.split()], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert (ran.stdout + ran.stderr).count(message) == 1, ran.stderr
    assert last_lines(ran.stderr)[-1] == f"traceback : megatron-lite: error: {message}"
    assert "<NO_OTHER_FAILURES>" in ran.stderr


SCRIPT = """
import os
from functools import partial
from tests.trainer.loop.test_failing import at_step
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    at_step(3, 1, "raise", int(os.environ["RANK"]))
from megatron_lite.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_starts_a_run_again_and_its_summary_names_the_cause(
    restarts: int, tmp_path: Path
) -> None:
    (tmp_path / "fails.py").write_text(SCRIPT)
    words = f"pretrain {LLAMA} --train-iters 5 --save ckpt --save-interval 2 --resume".split()
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    ran = subprocess.run(
        [*torchrun, "--max-restarts", str(restarts), "fails.py", *words], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=300, check=False,
    )  # fmt: skip
    if restarts:
        assert ran.returncode == 0, ran.stderr
        assert "continuing after step 2" in ran.stdout
    else:
        assert ran.returncode == 1
        summary = ran.stderr.partition("Root Cause")[2]
        assert "rank 1 (tp 0 pp 0 dp 1): ArithmeticError: a step went wrong" in summary, ran.stderr
