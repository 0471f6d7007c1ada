"""--keep-best and --early-stopping-patience: the checkpoint with the lowest validation loss stays, and a run may end after it."""

import json
from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import metrics, train
from tests.trainer.loop.test_manners import refused

BASE = Path(__file__).parents[2] / "fixtures" / "peft-llama-all-linear" / "base"
WORDS = (
    f"finetune --load {BASE} --finetune-data learned.jsonl --valid-finetune-data other.jsonl --seq-length 16 --lr 3e-2 "
    "--lr-decay-style constant --global-batch-size 4 --metrics-file metrics.jsonl --log-interval 1 --fp32 --eval-interval 1 "
    "--distributed-timeout-minutes 1 --make-vocab-size-divisible-by 2 --save ckpt"
)
BEST = "best_checkpointed_iteration.txt"


def write_texts(directory: Path) -> None:
    """Texts that are soon learned by heart, and others that continue differently."""
    directory.mkdir(exist_ok=True)
    for name, shift in (("learned", 0), ("other", 20)):
        records = [{"prompt": f"{n} 2", "completion": f"3 {n + shift} 4"} for n in range(7, 15)]
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))


def validation(directory: Path) -> list[float]:
    return [line["validation_loss"] for line in metrics(directory) if "validation_loss" in line]


def best_of(losses: list[float]) -> int:
    return losses.index(min(losses)) + 1


def iterations(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (directory / "ckpt").glob("iter_*"))


def recorded(directory: Path) -> int:
    return int((directory / "ckpt" / BEST).read_text())


@pytest.mark.parametrize(
    "flags", ["", "--lora-rank 4 --lora-targets all-linear", "--async-save --ckpt-format torch"]
)
def test_the_best_checkpoint_is_kept_beside_the_last(flags: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    log = train(tmp_path, 1, f"{WORDS} {flags} --train-iters 8 --keep-best --keep-last 1").log(0)
    losses = validation(tmp_path)
    best = best_of(losses)
    assert 1 < best < 8, losses
    assert iterations(tmp_path) == [best, 8]
    assert recorded(tmp_path) == best
    assert (
        f"lowest validation loss: {min(losses):.5f}, after step {best}, kept as ckpt/iter_{best:07}"
        in log
    )


def test_a_run_that_goes_on_compares_with_the_earlier_evaluations(tmp_path: Path) -> None:
    for name in ("whole", "same"):
        write_texts(tmp_path / name)
    command = f"{WORDS} --train-iters 8 --keep-best --keep-last 1"
    train(tmp_path / "whole", 1, command)
    best = recorded(tmp_path / "whole")
    train(tmp_path / "same", 1, f"{command} --exit-interval {best + 1}")
    again = train(tmp_path / "same", 1, f"{command} --resume").log(0)
    assert f"after step {best}, kept" in again
    assert iterations(tmp_path / "same") == iterations(tmp_path / "whole") == [best, 8]
    for number in (best, 8):
        name = f"iter_{number:07}"
        assert megaconv.fingerprint(tmp_path / "same" / "ckpt" / name) == megaconv.fingerprint(
            tmp_path / "whole" / "ckpt" / name
        )


def test_a_best_checkpoint_that_is_not_in_the_directory_is_not_compared_with(
    tmp_path: Path,
) -> None:
    write_texts(tmp_path)
    train(tmp_path, 1, f"{WORDS} --train-iters 6 --keep-last 1")
    losses = validation(tmp_path)
    assert best_of(losses) < 6
    assert not (tmp_path / "ckpt" / BEST).exists()
    train(tmp_path, 1, f"{WORDS} --train-iters 7 --keep-last 1 --keep-best --resume")
    assert recorded(tmp_path) == 7
    assert iterations(tmp_path) == [7]


def test_a_run_ends_after_evaluations_without_a_lower_loss(tmp_path: Path) -> None:
    for name in ("whole", "same"):
        write_texts(tmp_path / name)
    command = f"{WORDS} --train-iters 20 --keep-best --early-stopping-patience 2"
    log = train(tmp_path / "whole", 1, command).log(0)
    assert "ending as asked by --early-stopping-patience 2" in log
    losses = validation(tmp_path / "whole")
    best = best_of(losses)
    assert len(losses) == best + 2
    assert iterations(tmp_path / "whole")[-2:] == [best, best + 2]
    train(tmp_path / "same", 1, f"{command} --exit-interval {best + 1}")
    train(tmp_path / "same", 1, f"{command} --resume")
    assert validation(tmp_path / "same") == losses


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--keep-best", "--keep-best needs --save"),
        ("--keep-best --save ckpt --save-delta 2", "so there is nothing to do for --keep-best"),
        ("--keep-best --save ckpt", "--keep-best compares evaluations, and there are none"),
        ("--early-stopping-patience 2", "--early-stopping-patience compares evaluations"),
        ("--early-stopping-patience 0", "--early-stopping-patience 0 must be 1 or more"),
    ],
)
def test_flags_without_evaluations_are_refused(flags: str, words: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    command = f"finetune --load {BASE} --finetune-data learned.jsonl --train-iters 2 --fp32"
    assert words in refused(tmp_path, f"{command} {flags}")
