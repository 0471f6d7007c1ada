"""`--save-delta`: older checkpoints of a run as patches, from which `megaconv apply` makes every checkpoint again."""

import queue
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

import megaconv
from formats.errors import NotEnoughSpace
from megatron_lite.checkpoint import deltas
from megatron_lite.checkpoint.deltas import Deltas
from megatron_lite.processes import long_work
from tests.runs import assert_refused, run
from tests.trainer.loop.launches import launch
from tests.trainer.loop.test_runs import LLAMA, kill_and_resume, losses_by_step, train

STEPS = 6
COMMAND = f"pretrain {LLAMA} --train-iters {STEPS} --bf16 --save ckpt --save-interval 1 --resume"


def step(number: int) -> str:
    return f"iter_{number:07d}"


def kept(root: Path) -> tuple[list[int], list[int]]:
    """(iterations of full checkpoints, iterations of patches)."""
    found = [
        sorted(int(path.name[5:]) for path in place.glob("iter_*"))
        for place in (root, root / "deltas")
    ]
    return found[0], found[1]


def require_all(
    root: Path, whole: Path, target: Path, numbers: Sequence[int] = range(1, STEPS + 1)
) -> None:
    """Make checkpoints of a run again, and compare them with those of a run without patches."""
    fulls, patches = kept(root)
    assert {*fulls, *patches} == set(range(1, STEPS + 1))
    for number in numbers:
        begin = max(each for each in fulls if each <= number and each not in patches)
        chain = [root / "deltas" / step(each) for each in patches if begin < each <= number]
        made = root / step(number)
        if chain:
            made = target / step(number)
            outcome = run("apply", root / step(begin), *chain, "--save-dir", made)
            assert outcome.status == 0, outcome.err
        assert run("diff", made, whole / step(number), "--config-too").status == 0
        assert megaconv.fingerprint(made).optimizer is not None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that keeps all checkpoints full."""
    directory = tmp_path_factory.mktemp("whole")
    train(directory, 1, COMMAND)
    return directory


def test_a_run_keeps_older_checkpoints_as_patches(whole: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", 1, f"{COMMAND} --save-delta 3 --async-save")
    root = tmp_path / "run" / "ckpt"
    assert kept(root) == ([1, 4, 6], [2, 3, 5, 6])
    require_all(root, whole / "ckpt", tmp_path / "made", (3, 5))
    outcome = run(
        "apply", root / step(4), root / "deltas" / step(2), "--save-dir", tmp_path / "wrong"
    )
    assert_refused(outcome, 4, "is not the base of")
    assert not (tmp_path / "wrong").exists()


def slow_patches(rank: int) -> None:
    """No patch is made before the waiting ranks have been told three times that rank 0 still works."""
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    add, sign = Deltas.add, long_work._sign

    def counted_sign(state: int, group: dist.ProcessGroup) -> int:
        told.put(state)
        return sign(state, group)

    def slow_add(self: Deltas, iteration: int) -> None:
        for _ in range(3):
            told.get()
        add(self, iteration)

    long_work.SIGN_S, long_work._sign = 0.01, counted_sign
    Deltas.add = slow_add  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--use-distributed-optimizer --async-save",
        "--pipeline-model-parallel-size 2 --ckpt-format torch --async-save",
        "--use-distributed-optimizer --ckpt-format torch",
    ],
)
def test_a_run_of_several_ranks_keeps_older_checkpoints_as_patches(
    tmp_path: Path, flags: str
) -> None:
    train(tmp_path / "whole", 2, f"{COMMAND} {flags}")
    command = f"{COMMAND} {flags} --save-delta 3"
    assert launch(tmp_path / "run", 2, command, slow_patches).wait() == [0, 0]
    root = tmp_path / "run" / "ckpt"
    assert kept(root) == ([1, 4, 6], [2, 3, 5, 6])
    require_all(root, tmp_path / "whole" / "ckpt", tmp_path / "made")


def dying_patches(rank: int) -> None:
    """The disk of rank 0 is full when the first patch is written."""

    def full(*_: object, **__: object) -> None:
        raise NotEnoughSpace("ckpt/deltas: no space left")

    deltas.make_patch = full  # type: ignore[assignment]


@pytest.mark.slow
def test_a_patch_that_fails_ends_all_ranks_and_loses_no_checkpoint(tmp_path: Path) -> None:
    running = launch(tmp_path, 2, f"{COMMAND} --tp 2 --save-delta 3", dying_patches)
    assert all(running.wait())
    assert "no space left" in running.log(0)
    assert kept(tmp_path / "ckpt") == ([1, 2], [])


DYING = """
import os, sys
from pathlib import Path
from megatron_lite.checkpoint import deltas
def die(*a, **k):
    os._exit(9)
place = sys.argv[3]
if place == "before the patch":
    deltas.make_patch = die
elif place == "in the patch":
    from megaconv.patches import making
    making._write_small_files = die
elif place == "before a removal":
    deltas.remove = die
elif place == "in a removal":
    deltas.shutil.rmtree = die
deltas.Deltas(Path(sys.argv[1]), 3).add(int(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["before the patch", "in the patch", "before a removal", "in a removal"]
)
def test_a_save_that_dies_loses_no_checkpoint(whole: Path, tmp_path: Path, place: str) -> None:
    root = tmp_path / "ckpt"
    shutil.copytree(whole / "ckpt" / "hf", root / "hf")
    for number in range(1, STEPS + 1):
        shutil.copytree(whole / "ckpt" / step(number), root / step(number))
        if number == 3:
            words = [sys.executable, "-c", DYING, str(root), str(number), place]
            assert subprocess.run(words, check=False).returncode == 9
            fulls, patches = kept(root)
            assert {1, 2, 3} <= {*fulls, *patches}
            assert 3 in fulls
        else:
            Deltas(root, 3).add(number)
    assert not list((root / "deltas").glob(".*"))
    require_all(root, whole / "ckpt", tmp_path / "made")


@pytest.mark.slow
def test_a_run_that_continues_from_a_restored_checkpoint_ends_with_the_same_bits(
    whole: Path, tmp_path: Path
) -> None:
    root = tmp_path / "ckpt"
    shutil.copytree(whole / "ckpt" / "hf", root / "hf")
    for number in (1, 2, 3):
        shutil.copytree(whole / "ckpt" / step(number), root / step(number))
        Deltas(root, 9).add(number)
    run("apply", root / step(1), root / "deltas" / step(2), "--save-dir", tmp_path / "again")
    (tmp_path / "on").mkdir()
    words = f"{COMMAND} --load {tmp_path / 'again'}"
    train(tmp_path / "on", 1, words)
    assert megaconv.fingerprint(tmp_path / "on" / "ckpt") == megaconv.fingerprint(whole / "ckpt")
    assert losses_by_step(tmp_path / "on")[STEPS] == losses_by_step(whole)[STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(6))
def test_a_run_with_patches_may_be_killed_at_any_moment(
    whole: Path, tmp_path: Path, attempt: int
) -> None:
    command = f"{COMMAND} --save-delta 3"
    kill_and_resume(tmp_path, 1, command, 2 + random.Random(attempt).random() * 6)
    require_all(tmp_path / "ckpt", whole / "ckpt", tmp_path / "made")
