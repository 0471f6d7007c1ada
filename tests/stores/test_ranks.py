"""Several processes with stores on both sides: whole files are shared out, and rank 0 publishes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from formats.stores import part_sizes
from tests.conftest import FIXTURES
from tests.runs import run
from tests.stores.conftest import BUCKET
from tests.stores.small_store import Asked, Fault, SmallStore
from tests.stores.test_writing import assert_only

pytest.importorskip("torch")
LLAMA = FIXTURES / "peft-llama-all-linear/base"
_MAIN = (
    "from formats.stores import part_sizes, patience; part_sizes.PART_BYTES = 16 << 10; "
    "patience._FIRST_PAUSE = 0.001; from megaconv.engine import transfer; transfer.JOURNAL_SECONDS = 0; "
    "from megaconv.commands.cli import main; main()"
)


def together(
    size: int, *words: object, started: Callable[[list[int]], None] = lambda pids: None
) -> list[subprocess.CompletedProcess[str]]:
    """`megaconv WORDS` on each of `size` ranks, with rank 0 as the rendezvous. started: called with their processes."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    base = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    base |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(size)}
    command = [sys.executable, "-c", _MAIN, *map(str, words)]
    ranks = [
        subprocess.Popen(
            command,
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    started([process.pid for process in ranks])
    done = []
    for process in ranks:
        out, err = process.communicate(timeout=150)
        done.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    return done


@pytest.mark.slow
def test_two_ranks_convert_from_store_to_store_and_go_on_after_a_failure(
    writable: SmallStore,
) -> None:
    assert part_sizes.PART_BYTES == 16 << 10
    for file in LLAMA.iterdir():
        writable.put(f"model/{file.name}", file.read_bytes())
    words = ("--saver", "core", "--tp", 2)
    source = f"s3://{BUCKET}/model"
    assert run("convert", source, f"s3://{BUCKET}/alone", *words).status == 0
    target = f"s3://{BUCKET}/out"
    done = together(2, "convert", source, target, *words, "--verify")
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    assert_only(writable, writable.below("alone/"))

    for key in list(writable.below("out/")):
        del writable.objects[f"out/{key}"]

    def fail(asked: Asked) -> Fault | None:
        is_commit = asked.action == "complete" and asked.key.startswith("out/")
        return Fault("status", 403, "AccessDenied") if is_commit else None

    writable.hook = fail
    done = together(2, "convert", source, target, *words, "--resume")
    assert 0 not in [each.returncode for each in done]
    errors = [each.stderr for each in done if each.stderr]
    assert len(errors) == 1
    assert "s3:PutObject" in errors[0]
    assert not writable.below("out/")
    writable.restart()
    done = together(2, "convert", source, target, *words, "--resume")
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    assert_only(writable, writable.below("alone/"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_ends_the_run_and_the_next_run_continues(
    writable: SmallStore, victim: int
) -> None:
    """SIGKILL of one of three ranks, while parts are sent."""
    words = ("--saver", "core", "--tp", 2, "--pp", 2)
    assert run("convert", LLAMA, f"s3://{BUCKET}/alone", *words).status == 0
    before = len(writable.of("part"))
    target, pids = f"s3://{BUCKET}/out", list[int]()

    def strike(asked: Asked) -> None:
        if asked.action == "part" and len(writable.of("part")) == before + 3:
            os.kill(pids[victim], signal.SIGKILL)

    writable.done = strike  # type: ignore[assignment]
    done = together(3, "convert", LLAMA, target, *words, "--resume", started=pids.extend)
    assert done[victim].returncode == -signal.SIGKILL
    assert 0 not in [each.returncode for each in done]
    visible = [name for name in writable.below("out/") if ".megaconv-" not in name]
    assert not visible
    writable.restart()
    done = together(3, "convert", LLAMA, target, *words, "--resume")
    assert [each.returncode for each in done] == [0, 0, 0], [each.stderr for each in done]
    assert_only(writable, writable.below("alone/"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["hf --max-shard-size 20KB", "core --tp 2 --pp 2", "core --ckpt-format torch_dist"]
)
def test_three_ranks_convert_from_store_to_store(writable: SmallStore, words: str) -> None:
    """torchrun starts the ranks, which find each other by its own store."""
    for file in LLAMA.iterdir():
        writable.put(f"model/{file.name}", file.read_bytes())
    source = f"s3://{BUCKET}/model"
    # Three ranks write a distributed checkpoint as three files.
    files = ("--dist-files", 3) if "torch_dist" in words else ()
    given = ("--saver", *words.split(), *files)
    alone = run("convert", source, f"s3://{BUCKET}/alone", *given)
    assert alone.status == 0, alone.err
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "3", "--no-python", sys.executable, "-c", _MAIN]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, "convert", source, f"s3://{BUCKET}/out", *map(str, given)],
        env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_only(writable, writable.below("alone/"))
