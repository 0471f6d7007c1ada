"""Runs on rated answers (KTO): what they say, save and refuse; they go on to the same bits, from the same reference."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import megaconv
from megatron_lite.objectives.examples import balance
from megatron_lite.settings.learning import Kto
from tests.trainer.loop.launches import LLAMA, metrics, train
from tests.trainer.loop.test_manners import refused

BASE = Path(__file__).parents[2] / "fixtures" / "peft-llama-all-linear" / "base"
WORDS = (
    f"finetune --load {BASE} --finetune-data rated.jsonl --kto --kto-beta 0.5 --seq-length 16 --lr 1e-2 --lr-decay-style constant "
    "--global-batch-size 4 --metrics-file metrics.jsonl --log-interval 1 --distributed-timeout-minutes 1 --fp32 "
    "--make-vocab-size-divisible-by 2 --split 80,20,0 --eval-interval 2 --eval-iters 1 --train-iters 4 --save ckpt"
)
FIGURES = ("loss", "chosen_reward", "rejected_reward", "kl")


def write_rated(directory: Path, count: int = 10) -> None:
    directory.mkdir(exist_ok=True)
    records = [
        {"prompt": f"{n} 2", "completion": f"3 {n} 4", "label": n % 3 > 0, "id": n}
        for n in range(7, 7 + count)
    ]
    (directory / "rated.jsonl").write_text("\n".join(map(json.dumps, records)))


def figures(directory: Path) -> list[dict[str, float]]:
    """The figures of each step. A step may have no answer of one kind."""
    return [
        {name: line[name] for name in FIGURES if name in line}
        for line in metrics(directory)
        if "loss" in line
    ]


def test_a_run_says_what_it_learns_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    for name in ("whole", "same"):
        write_rated(tmp_path / name)
    log = train(tmp_path / "whole", 1, f"{WORDS} --show-sample").log(0)
    for words in (
        "10 rated answers (7 good, 3 bad), 60 tokens (40 learned), 1 row of 16 tokens each, 2 steps an epoch",
        "the first rated answer",
        "good answers together count 2.33 times as much as bad ones; the authors of KTO advise 1 to 1.33, such as "
        "--kto-undesirable-weight 2.03",
        'fields that are not read: "id"',
        "the reference's log-probabilities of 8 rated answers for training: ",
        "the reference's log-probabilities of 2 rated answers for validation: ",
    ):
        assert words in log, (words, log)
    steps = re.findall(
        r"^step +\d+/4 .* loss (\S+) \| rewards (.*) \| KL (\S+) \|", log, re.MULTILINE
    )
    assert steps[0][0] == "0.50000"
    assert steps[0][2] == "0.0000"
    assert float(steps[-1][0]) < 0.5
    assert "good" in steps[-1][1]
    assert "validation loss" in log
    assert "perplexity" not in log

    cached = f"{WORDS} --kto-reference-cache kept"
    train(tmp_path / "same", 1, f"{cached} --exit-interval 2")
    again = train(tmp_path / "same", 1, f"{cached} --resume").log(0)
    assert "continuing after step 2, 8 samples" in again
    assert "8 rated answers for training: taken from kept/kto-reference-training.npz" in again
    assert figures(tmp_path / "same") == figures(tmp_path / "whole")
    assert megaconv.fingerprint(tmp_path / "same" / "ckpt") == megaconv.fingerprint(
        tmp_path / "whole" / "ckpt"
    )


@pytest.mark.parametrize(
    ("good", "weights", "words"),
    [
        ((1, 1, 0, 0), (1.0, 1.0), ""),
        ((1, 1, 1, 0), (1.0, 1.0), "count 3 times as much as bad ones"),
        ((1, 0, 0, 0), (1.0, 1.0), "such as --kto-undesirable-weight 0.29"),
        ((1, 1, 1, 1), (1.0, 1.0), "all answers are good"),
        ((0, 0), (0.0, 1.0), "all answers are bad"),
        ((1, 1, 1, 0), (0.0, 1.0), ""),
    ],
)
def test_weights_that_are_far_from_balanced_are_mentioned(
    good: tuple[int, ...], weights: tuple[float, float], words: str
) -> None:
    kto = Kto(kto_desirable_weight=weights[0], kto_undesirable_weight=weights[1])
    lines = list(balance(np.array(good, bool), kto))
    assert len(lines) == bool(words)
    assert words in "".join(lines)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"--kto --dpo --load {BASE}", "--kto and --dpo are two objectives"),
        (f"--kto --grpo --load {BASE}", "--kto and --grpo are two objectives"),
        (f"--kto --reward-modeling --load {BASE}", "--kto and --reward-modeling are two objectives"),
        (f"--kto --load {BASE} --kto-desirable-weight -1", "--kto-desirable-weight -1 must be 0 or more"),
        (f"--kto --load {BASE} --kto-desirable-weight 0 --kto-undesirable-weight 0", "are both 0, so that nothing is learned"),
    ],
)  # fmt: skip
def test_flags_that_contradict_each_other_are_refused(
    flags: str, words: str, tmp_path: Path
) -> None:
    model = LLAMA.replace("--mock-data ", "")
    assert words in refused(
        tmp_path, f"pretrain {model} --finetune-data rated.jsonl --train-iters 2 {flags}"
    )
