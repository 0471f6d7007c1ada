"""--keep-best and --early-stopping-patience: the checkpoint with the lowest validation loss stays, and a run may end after it."""

import json
from pathlib import Path

import pytest

import megaconv
from megaconv.hub import resolve
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
    ("flags", "steps"),
    [("", 8), ("--lora-rank 8 --lr 6e-2", 20), ("--async-save --ckpt-format torch", 8)],
)
def test_the_best_checkpoint_is_kept_beside_the_last(
    flags: str, steps: int, tmp_path: Path
) -> None:
    write_texts(tmp_path)
    command = f"{WORDS} {flags} --train-iters {steps} --keep-best --keep-last 1"
    log = train(tmp_path, 1, command).log(0)
    losses = validation(tmp_path)
    best = best_of(losses)
    assert 1 < best < steps, losses
    assert iterations(tmp_path) == [best, steps]
    assert recorded(tmp_path) == best
    assert (
        f"lowest validation loss: {min(losses):.5f}, after step {best}, kept as ckpt/iter_{best:07}"
        in log
    )
    assert resolve(f"{tmp_path}/ckpt/best") == tmp_path / "ckpt" / f"iter_{best:07}"


def test_a_run_starts_from_the_best_checkpoint_of_another(tmp_path: Path) -> None:
    write_texts(tmp_path)
    train(tmp_path, 1, f"{WORDS} --train-iters 8 --keep-best --keep-last 1")
    best = recorded(tmp_path)
    again = WORDS.replace(str(BASE), "ckpt/best").replace("--save ckpt", "--save again")
    log = train(tmp_path, 1, f"{again} --train-iters 1").log(0)
    assert f"weights of ckpt/iter_{best:07} " in log
    log = train(
        tmp_path, 1, f"{again.replace('finetune', 'pretrain', 1)} --train-iters 9 --save on"
    ).log(0)
    assert f"continuing after step {best}" in log


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


def test_all_evaluations_read_the_same_samples(tmp_path: Path) -> None:
    """Five samples fill one batch and a part of another."""
    write_texts(tmp_path)
    long = [{"prompt": f"{n}", "completion": " ".join(["3"] * 11 + [str(n)])} for n in range(5)]
    (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, long)))
    command = WORDS.replace("--lr 3e-2", "--lr 0")
    train(tmp_path, 1, f"{command} --train-iters 4 --keep-best --keep-last 1")
    assert len(set(validation(tmp_path))) == 1
    assert recorded(tmp_path) == 1
    assert iterations(tmp_path) == [1, 4]


def test_a_run_without_the_flag_keeps_the_recorded_checkpoint(tmp_path: Path) -> None:
    write_texts(tmp_path)
    command = f"{WORDS} --keep-last 1"
    train(tmp_path, 1, f"{command} --train-iters 8 --keep-best")
    best = recorded(tmp_path)
    train(tmp_path, 1, f"{command} --train-iters 9 --resume")
    assert iterations(tmp_path) == [best, 9]
    log = train(tmp_path, 1, f"{command} --train-iters 10 --resume --keep-best").log(0)
    assert f"after step {best}, kept" in log
    assert iterations(tmp_path) == [best, 10]


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        ("", "--valid-finetune-data learned.jsonl"),
        ("", "--dpo --dpo-loss simpo"),
        ("--dpo", "--dpo --dpo-loss ipo"),
        ("--dpo --dpo-loss simpo", "--dpo --dpo-loss simpo --simpo-gamma 2"),
        ("", "--eval-iters 2"),
        ("", "--eval-iters 1 --global-batch-size 2"),
    ],
)
def test_another_validation_loss_is_not_compared_with(
    flags: str, change: str, tmp_path: Path
) -> None:
    write_texts(tmp_path)
    if "--dpo" in flags:
        write_pairs(tmp_path)
    train(tmp_path, 1, f"{WORDS} --train-iters 6 --keep-best --keep-last 1 {flags}")
    assert recorded(tmp_path) < 6
    if "--dpo" in change:
        write_pairs(tmp_path)
    words = f"{WORDS} --train-iters 7 --keep-best --keep-last 1 --resume {change}"
    log = train(tmp_path, 1, words).log(0)
    assert "after step 7, kept" in log
    assert recorded(tmp_path) == 7


def write_pairs(directory: Path) -> None:
    """Pairs of answers, and the same ones with the other answer chosen, whose loss rises from the first step."""
    for name, chosen in (("learned", True), ("other", False)):
        answers = [("3", str(n)) if chosen else (str(n), "3") for n in range(7, 15)]
        pairs = [
            {"prompt": f"{n} 2", "chosen": good, "rejected": bad}
            for n, (good, bad) in enumerate(answers, 7)
        ]
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def test_a_run_ends_after_evaluations_without_a_lower_loss(tmp_path: Path) -> None:
    for name in ("whole", "same"):
        write_texts(tmp_path / name)
    command = f"{WORDS} --train-iters 20 --keep-best --early-stopping-patience 2"
    log = train(tmp_path / "whole", 1, command).log(0)
    assert "ending as asked by --early-stopping-patience 2" in log
    losses = validation(tmp_path / "whole")
    best = best_of(losses)
    assert len(losses) == best + 2
    kept = iterations(tmp_path / "whole")
    assert kept[-2:] == [best, best + 2]
    train(tmp_path / "same", 1, f"{command} --exit-interval {best + 1}")
    for _ in range(2):  # the second restart has nothing to do
        again = train(tmp_path / "same", 1, f"{command} --resume").log(0)
        assert "ending as asked by --early-stopping-patience 2" in again
    assert validation(tmp_path / "same") == losses
    assert iterations(tmp_path / "same")[-3:] == [best, best + 1, best + 2]


def test_the_next_commands_name_the_best_checkpoint(tmp_path: Path) -> None:
    write_texts(tmp_path)
    words = WORDS.replace(f"--load {BASE}", f"{BASE} learned.jsonl").replace(
        "--finetune-data learned.jsonl ", ""
    )
    log = train(tmp_path, 1, f"{words} --train-iters 8 --keep-best").log(0)
    best = f"ckpt/iter_{recorded(tmp_path):07}"
    assert f"megaconv convert {best} ckpt-hf --saver hf" in log
    assert f"megatron-lite generate --load {best} 'PROMPT'" in log
    megaconv.convert(tmp_path / best, tmp_path / "hf", saver="hf")
    assert (tmp_path / "hf" / "config.json").is_file()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--keep-best", "--keep-best needs --save"),
        ("--keep-best --save ckpt --save-delta 2", "so there is nothing to do for --keep-best"),
        ("--keep-best --save ckpt", "--keep-best compares evaluations, and there are none"),
        ("--early-stopping-patience 2", "--early-stopping-patience compares evaluations"),
        (
            "--keep-best --save ckpt --split 8,2,0 --eval-interval 1000",
            "--eval-interval 1000 is more than the run's 2 steps",
        ),
        ("--early-stopping-patience 0", "--early-stopping-patience 0 must be 1 or more"),
    ],
)
def test_flags_without_evaluations_are_refused(flags: str, words: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    command = f"finetune --load {BASE} --finetune-data learned.jsonl --train-iters 2 --fp32"
    assert words in refused(tmp_path, f"{command} {flags}")
