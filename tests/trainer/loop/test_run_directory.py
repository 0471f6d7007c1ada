"""The directory that a run saves to: nobody else's, and looked at before the first step."""

import re
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import megaconv
from formats.run_lock import OF_A_RUN, RunLock
from megaconv.errors import TargetExists, UsageError
from megatron_lite.loop import run_directory
from tests.models import write_llama
from tests.trainer.loop.launches import LLAMA, Running, launch, metrics, train
from tests.trainer.loop.test_manners import refused
from tests.trainer.loop.test_starts import WORDS

ENDLESS = (
    f"pretrain {LLAMA} --train-iters 100000 --save ckpt --save-interval 2 --keep-last 2 --resume"
)


def saving(directory: Path, size: int = 1) -> Running:
    """A run that has saved and goes on."""
    running = launch(directory, size, ENDLESS)
    while not (directory / "ckpt" / "latest_checkpointed_iteration.txt").is_file():
        assert running.processes[0].is_alive(), running.logs()
        time.sleep(0.05)
    return running


def saved_iterations(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "ckpt").glob("iter_*"))


@pytest.mark.parametrize(
    "command", ["finetune --load base", "pretrain --load base", "pretrain --load base --finetune", "finetune --load base --lora-rank 2"]
)  # fmt: skip
def test_no_command_saves_over_the_run_of_another(command: str, tmp_path: Path) -> None:
    for name in ("base", "ckpt"):
        train(tmp_path, 1, f"pretrain {LLAMA} --train-iters 2 --save {name}")
    before = megaconv.fingerprint(tmp_path / "ckpt")
    error = refused(tmp_path, f"{command} {WORDS} --train-iters 3 --save ckpt")
    assert (
        error
        == "--save ckpt holds the checkpoint of another run: --resume continues it, another directory keeps it"
    )
    assert saved_iterations(tmp_path) == ["iter_0000002"]
    assert megaconv.fingerprint(tmp_path / "ckpt") == before


@pytest.mark.parametrize("flags", ["", "--resume", "--lora-rank 2"])
def test_no_run_is_saved_into_a_hugging_face_model(flags: str, tmp_path: Path) -> None:
    """Programs would read two models there: some the old one, some the new one."""
    write_llama(tmp_path / "model", vocab=60)
    error = refused(tmp_path, f"finetune --load model {WORDS} --train-iters 3 --save model {flags}")
    assert error.startswith("--save model: is the directory of a Hugging Face model")
    assert not list((tmp_path / "model").glob("iter_*"))


@pytest.mark.parametrize("size", [1, 2])
def test_two_runs_at_a_time_never_save_to_one_directory(size: int, tmp_path: Path) -> None:
    first = saving(tmp_path, size)
    (tmp_path / "link").symlink_to("ckpt")
    for name in ("ckpt", "link"):
        second = launch(
            tmp_path / "second", size, ENDLESS.replace("--save ckpt", f"--save ../{name}")
        )
        assert second.wait() == [2] * size, second.logs()
        assert (
            f"--save ../{name}: another run saves there just now; wait until it has ended"
            in second.logs()
        )
    first.terminate(0)
    assert first.wait() == [0] * size, first.logs()
    assert not (tmp_path / "ckpt" / ".lock").exists()
    assert "continuing after step" in train(tmp_path, size, f"{ENDLESS} --exit-interval 1").log(0)


def test_the_lock_of_a_killed_run_is_free_and_readers_ignore_it(tmp_path: Path) -> None:
    first = saving(tmp_path)
    first.kill()
    first.wait()
    assert (tmp_path / "ckpt" / ".lock").is_file()
    assert megaconv.inspect(tmp_path / "ckpt").to_json()["iteration"] > 1
    assert "continuing after step" in train(tmp_path, 1, f"{ENDLESS} --exit-interval 1").log(0)


def test_a_run_that_is_started_again_waits_for_the_lock_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, lock = RunLock(tmp_path, OF_A_RUN), RunLock(tmp_path, OF_A_RUN)
    former.take()
    with pytest.raises(TargetExists, match="another run saves there just now"):
        run_directory._take(lock, tmp_path, run_directory._patience_s())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    threading.Timer(0.5, former.release).start()
    run_directory._take(lock, tmp_path, run_directory._patience_s())
    assert lock.is_held
    lock.leave()


def test_a_machine_that_does_not_see_the_directory_of_rank_0_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match="can't write where rank 0 does; choose a directory that all machines share",
    ):
        run_directory._require_shared(tmp_path)


@pytest.mark.parametrize(
    ("place", "cause"), [("/dev/null/ckpt", "Not a directory"), ("file", "File exists")]
)
def test_a_directory_that_can_not_be_written_is_refused_before_the_first_step(
    place: str, cause: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    error = refused(tmp_path, f"pretrain {LLAMA} --train-iters 2 --save {place}")
    assert error == f"--save {place}: can't be written: {cause}; choose another directory"
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_run_that_is_refused_leaves_no_directory(tmp_path: Path) -> None:
    command = f"pretrain {LLAMA} --train-iters 2"
    refused(tmp_path, f"{command} --save new/ckpt --load missing")
    assert not (tmp_path / "new" / "ckpt").exists()
    (tmp_path / "old").mkdir()
    refused(tmp_path, f"{command} --save old --load missing")
    assert list((tmp_path / "old").iterdir()) == []


def free_bytes(count: int, rank: int) -> None:
    """The disk has so many."""
    import shutil
    from types import SimpleNamespace

    shutil.disk_usage = lambda path: SimpleNamespace(free=count)  # type: ignore[assignment, return-value]


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_disk_without_room_for_a_checkpoint_is_found_before_the_first_step(
    form: str, tmp_path: Path
) -> None:
    command = f"pretrain {LLAMA} --train-iters 2 --save ckpt --ckpt-format {form}"
    running = launch(tmp_path, 2, command, partial(free_bytes, 100_000))
    assert running.wait() == [5, 5], running.logs()
    found = re.search(
        r"--save ckpt: a checkpoint takes ([\d,]+) bytes, and 100,000 are free", running.logs()
    )
    assert found is not None, running.logs()
    needed = int(found[1].replace(",", ""))
    assert not (tmp_path / "ckpt").exists()
    assert not (tmp_path / "metrics.jsonl").exists() or metrics(tmp_path) == []

    train(tmp_path, 2, command)
    written = sum(
        path.stat().st_size
        for path in (tmp_path / "ckpt" / "iter_0000002").rglob("*")
        if path.is_file()
    )
    assert 0.5 * written < needed <= written
    bare = launch(
        tmp_path / "bare", 2, f"{command} --no-save-optim", partial(free_bytes, needed // 2)
    )
    assert bare.wait() == [0, 0], bare.logs()


def test_a_run_without_save_warns_at_its_start(tmp_path: Path) -> None:
    first, second, *_ = train(tmp_path, 1, f"pretrain {LLAMA} --train-iters 2").log(0).splitlines()
    assert "one process" in first
    assert second == "no --save: nothing of this run will be kept"
    assert "nothing of this run" not in train(
        tmp_path, 1, f"pretrain {LLAMA} --train-iters 2 --save ckpt"
    ).log(0)


def test_a_copy_without_the_tracker_is_continued_if_it_has_one_iteration(tmp_path: Path) -> None:
    """Otherwise the run would begin anew and replace the checkpoint."""
    command = (
        f"pretrain {LLAMA} --save ckpt --save-interval 2 --lr-decay-iters 9 --resume --train-iters"
    )
    train(tmp_path, 1, f"{command} 2")
    tracker = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    train(tmp_path, 1, f"{command} 3")
    assert [line["iteration"] for line in metrics(tmp_path)] == [1, 2, 3]
    tracker.unlink()
    running = launch(tmp_path, 1, f"{command} 4")
    assert running.wait() == [3]
    assert "ckpt: has iter_0000002, iter_0000003, but no latest_checkpointed" in running.log(0)
    tracker.write_text("3")
    train(tmp_path, 1, f"{command} 4")
    assert [line["iteration"] for line in metrics(tmp_path)] == [1, 2, 3, 4]


def full_with_a_partial_save(rank: int) -> None:
    """The disk is full as long as a killed save's files are there."""
    import shutil
    from types import SimpleNamespace

    shutil.disk_usage = lambda path: SimpleNamespace(  # type: ignore[assignment]
        free=0 if any(Path(path).glob(".iter_*.partial")) else 10**9  # type: ignore[arg-type]
    )


def test_the_files_of_a_killed_save_are_no_lack_of_room(tmp_path: Path) -> None:
    (tmp_path / "ckpt" / ".iter_0000002.partial").mkdir(parents=True)
    command = f"pretrain {LLAMA} --train-iters 2 --save ckpt"
    running = launch(tmp_path, 2, command, full_with_a_partial_save)
    assert running.wait() == [0, 0], running.logs()
    assert (tmp_path / "ckpt" / "iter_0000002").is_dir()
