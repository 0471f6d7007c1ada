"""Runs on pairs of answers: what they say, choose, save and refuse; they go on to the same bits, from the same reference."""

import json
import re
from pathlib import Path

import pytest

import megaconv
from tests.trainer.loop.launches import LLAMA, launch, metrics, train
from tests.trainer.loop.test_manners import refused

PEFT = Path(__file__).parents[2] / "fixtures"
BASE = PEFT / "peft-llama-all-linear" / "base"
WORDS = (
    f"finetune --load {BASE} --finetune-data pairs.jsonl --dpo --seq-length 16 --lr 1e-2 --lr-decay-style constant --log-interval 1 "
    "--global-batch-size 4 --metrics-file metrics.jsonl --distributed-timeout-minutes 1 --make-vocab-size-divisible-by 2 --fp32"
)
FIGURES = ("loss", "chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy")


def write_pairs(directory: Path, count: int = 8) -> None:
    directory.mkdir(exist_ok=True)
    records = [
        {"prompt": f"{n} 2", "chosen": f"3 {n} 4", "rejected": f"{n} 5", "id": n}
        for n in range(7, 7 + count)
    ]
    (directory / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))


def figures(directory: Path) -> list[list[float]]:
    return [[line[name] for name in FIGURES] for line in metrics(directory) if "loss" in line]


def test_a_run_says_what_it_compares_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    for name in ("whole", "same"):
        write_pairs(tmp_path / name)
    command = f"{WORDS} --save ckpt --split 80,20,0 --eval-interval 2 --eval-iters 1 --show-sample"
    log = train(tmp_path / "whole", 1, f"{command} --train-iters 4").log(0)
    for words in (
        "8 pairs, 88 tokens (56 learned), 2 rows of 16 tokens each, 1.5 steps an epoch",
        "the first pair: ",
        'fields that are not read: "id"',
        "the reference's log-probabilities of 6 pairs for training: ",
        "the reference's log-probabilities of 2 pairs for validation: ",
    ):
        assert words in log, (words, log)
    lines = re.findall(
        r"^step +\d+/4 .* loss (\S+) \| rewards (\S+) chosen, (\S+) rejected, margin (\S+), accuracy (\S+)% \|",
        log,
        re.M,
    )
    assert lines[0] == ("0.69315", "0.0000", "0.0000", "0.0000", "0.0")
    assert float(lines[-1][0]) < 0.69
    assert float(lines[-1][3]) > 0
    assert "validation loss" in log
    assert "perplexity" not in log

    train(tmp_path / "same", 1, f"{command} --train-iters 4 --exit-interval 2")
    again = train(tmp_path / "same", 1, f"{command} --train-iters 4 --resume")
    assert "continuing after step 2, 8 samples" in again.log(0)
    assert figures(tmp_path / "same") == figures(tmp_path / "whole")
    assert megaconv.fingerprint(tmp_path / "same" / "ckpt") == megaconv.fingerprint(
        tmp_path / "whole" / "ckpt"
    )


def test_a_cached_reference_gives_the_same_bits(
    tmp_path: Path,
) -> None:
    for name in ("without", "kept"):
        write_pairs(tmp_path / name)
    command = f"{WORDS} --split 80,20,0 --eval-interval 2 --eval-iters 1 --train-iters 4"
    train(tmp_path / "without", 1, f"{command} --save ckpt")
    cached = f"{command} --dpo-reference-cache kept"
    first = train(tmp_path / "kept", 1, f"{cached} --save ckpt --exit-interval 2")
    assert "log-probabilities of 6 pairs for training: 0" in first.log(0)
    again = train(tmp_path / "kept", 1, f"{cached} --save ckpt --resume").log(0)
    assert (
        "log-probabilities of 6 pairs for training: taken from kept/dpo-reference-training.npz"
        in again
    )
    assert (
        "log-probabilities of 2 pairs for validation: taken from kept/dpo-reference-validation.npz"
        in again
    )
    assert figures(tmp_path / "kept") == figures(tmp_path / "without")
    assert megaconv.fingerprint(tmp_path / "kept" / "ckpt") == megaconv.fingerprint(
        tmp_path / "without" / "ckpt"
    )

    (tmp_path / "kept" / "pairs.jsonl").write_text(
        (tmp_path / "kept" / "pairs.jsonl").read_text().replace("7 2", "7 3")
    )
    other = train(tmp_path / "kept", 1, f"{cached} --save other").log(0)
    assert (
        "training.npz: was made with other data, tokenizer or chat template; the reference's log-probabilities are computed"
        in other
    )
    (tmp_path / "kept" / "kept" / "dpo-reference-training.npz").write_bytes(b"nothing")
    damaged = train(tmp_path / "kept", 1, f"{cached} --save third --tp 1").log(0)
    assert "dpo-reference-training.npz: is damaged" in damaged
    assert sorted(path.name for path in (tmp_path / "kept" / "kept").iterdir()) == [
        "dpo-reference-training.npz",
        "dpo-reference-validation.npz",
    ]


@pytest.mark.slow
def test_a_cached_reference_serves_other_layouts_and_adapters(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    command = f"{WORDS} --tp 2 --sequence-parallel --eval-iters 0 --lora-rank 4 --train-iters 3 --dpo-reference-cache kept"
    train(tmp_path, 2, f"{command} --save one")
    first = figures(tmp_path)
    again = train(tmp_path, 2, f"{command} --save two").log(0)
    assert "taken from kept/dpo-reference-training.npz" in again
    assert figures(tmp_path)[len(first) :] == first
    moved = train(
        tmp_path, 1, f"{command.replace('--tp 2 --sequence-parallel', '')} --save three"
    ).log(0)
    assert "was made with other layout, batch, precision or version of torch" in moved


@pytest.mark.parametrize("loss", ["simpo --dpo-beta 2", "orpo"])
def test_a_loss_without_a_reference_measures_none_and_goes_on_without_load(
    loss: str, tmp_path: Path
) -> None:
    for name in ("whole", "same"):
        write_pairs(tmp_path / name)
    command = f"{WORDS} --dpo-loss {loss} --split 80,20,0 --eval-interval 2 --eval-iters 1 --train-iters 4 --save ckpt"
    log = train(tmp_path / "whole", 1, command).log(0)
    assert "reference" not in log
    found = figures(tmp_path / "whole")
    assert found[-1][0] < found[0][0]
    train(tmp_path / "same", 1, f"{command} --exit-interval 2")
    again = command.replace(f"finetune --load {BASE}", "pretrain")
    train(tmp_path / "same", 1, f"{again} --resume")
    assert figures(tmp_path / "same") == found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"--dpo --load {BASE} --dpo-label-smoothing 0.5", "--dpo-label-smoothing 0.5 has to lie between 0 and 0.5"),
        (f"--dpo --load {BASE} --dpo-loss ipo --dpo-label-smoothing 0.1", "--dpo-label-smoothing requires --dpo-loss sigmoid"),
        (f"--dpo --load {BASE} --simpo-gamma 1", "--simpo-gamma requires --dpo-loss simpo"),
        (f"--dpo --load {BASE} --dpo-loss simpo --simpo-gamma -1", "--simpo-gamma -1 must be 0 or more"),
        (f"--dpo --load {BASE} --dpo-loss orpo --dpo-reference-cache kept", "--dpo-loss orpo has no reference model"),
    ],
)  # fmt: skip
def test_flags_that_contradict_each_other_are_refused(
    flags: str, words: str, tmp_path: Path
) -> None:
    model = LLAMA.replace("--mock-data ", "")
    assert words in refused(
        tmp_path, f"pretrain {model} --finetune-data pairs.jsonl --train-iters 2 {flags}"
    )


def test_a_pair_without_the_flag_is_refused_with_the_flag(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    running = launch(tmp_path, 1, f"{WORDS.replace('--dpo ', '')} --train-iters 1")
    assert running.wait() == [3]
    assert (
        "pairs.jsonl:1: is a pair of a chosen and a rejected answer; --dpo learns from pairs"
        in running.log(0)
    )


def test_a_missing_model_is_named_before_missing_flags_and_flags_of_other_trainers_are_known(
    tmp_path: Path,
) -> None:
    assert "nothere" in refused(tmp_path, "finetune --load nothere")
    assert "unknown flag --learning-rate; did you mean --lr?" in refused(
        tmp_path, "finetune --learning-rate 1"
    )
