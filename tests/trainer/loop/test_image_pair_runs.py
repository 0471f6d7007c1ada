"""Runs on pairs of answers to questions with images: the losses and steps of transformers' whole model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.loop import whole_models
from tests.trainer.loop.launches import train
from tests.trainer.loop.whole_models import STEPS, OfTransformers, assert_weights, message
from tests.trainer.multimodal import MODELS, create, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")
pytestmark = pytest.mark.oracle

LR = 0.05
BETA = 0.5
COMMAND = (
    f"finetune --load hf --finetune-data data/pairs.jsonl --dpo --dpo-beta {BETA} --lr {LR} --global-batch-size 4 --micro-batch-size 2 "
    f"--seq-length 192 {STEPS}"
)
"""Each step has all pairs, so their order doesn't matter."""
FIGURES = ("loss", "chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy")


QUESTIONS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    ([{"type": "image"}, {"type": "text", "text": "what is it?"}], ("0.png",)),
    (
        [
            {"type": "text", "text": "compare "},
            {"type": "image"},
            {"type": "text", "text": " and "},
            {"type": "image"},
        ],
        ("1.png", "2.png"),
    ),
    ("no image", ()),
    ([{"type": "image"}, {"type": "text", "text": "hello"}], ("3.png",)),
)
"""The question of each pair as chat templates take it, and its images."""
FAST = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava_next")
"""Models whose runs are not only among the slow tests."""
ANSWERS = (("a cat", "a dog!"), ("they differ", "same"), ("none", "an image"), ("hi", "bye"))


def records() -> list[Any]:
    """The same pairs in the forms of datasets: of TRL with parts, of TRL with whole chats, of texts, of LLaMA-Factory."""
    first, second, third, _ = (question for question, _ in QUESTIONS)
    asked = [{**part, **({"image": "0.png"} if part["type"] == "image" else {})} for part in first]
    compared = message("user", second)
    yes, no = ([message("assistant", text) for text in each] for each in zip(*ANSWERS, strict=True))
    return [
        {"prompt": [message("user", asked)], "chosen": [yes[0]], "rejected": [no[0]]},
        {"chosen": [compared, yes[1]], "rejected": [compared, no[1]], "images": ["1.png", "2.png"]},
        {"prompt": [message("user", third)], "chosen": [yes[2]], "rejected": [no[2]]},
        {
            "conversations": [{"from": "human", "value": "<image>hello"}],
            "chosen": {"from": "gpt", "value": ANSWERS[3][0]},
            "rejected": {"from": "gpt", "value": ANSWERS[3][1]},
            "images": ["3.png"],
        },
    ]


def make(kind: str, directory: Path) -> None:
    create(kind, directory / "hf")
    write_chats(directory / "data")
    lines = map(json.dumps, records())
    (directory / "data" / "pairs.jsonl").write_text("\n".join(lines) + "\n")


def log_probabilities(whole: OfTransformers) -> torch.Tensor:
    """[pairs, 2]: of the chosen and the rejected answers."""
    rows = [
        torch.stack([whole.log_probability(question, images, answer) for answer in answers])
        for (question, images), answers in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    return torch.stack(rows)


def step(whole: OfTransformers, reference: torch.Tensor) -> list[float]:
    """Make a step of DPO. Returns FIGURES before it."""
    gains = log_probabilities(whole) - reference
    margins = BETA * (gains[:, 0] - gains[:, 1])
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    whole.learn(loss, LR)
    rewards = BETA * gains.mean(0)
    found = (loss, rewards[0], rewards[1], margins.mean(), (margins > 0).float().mean())
    return [value.item() for value in found]


def steps_of_transformers(
    kind: str, directory: Path, count: int = 2
) -> tuple[list[list[float]], Any]:
    """(FIGURES of each step, the model after them)."""
    whole = OfTransformers(kind, directory)
    with torch.no_grad():
        reference = log_probabilities(whole)
    return [step(whole, reference) for _ in range(count)], whole.model


def assert_figures(directory: Path, expected: list[list[float]]) -> None:
    whole_models.assert_figures(directory, FIGURES[:4], expected)
    # Before the first step, the margins are 0.
    assert whole_models.figures(directory, FIGURES)[-1][4] == expected[-1][4]


@pytest.mark.parametrize("kind", FAST)
def test_two_steps_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """The second step's rewards compare with a reference that read the same images."""
    make(kind, tmp_path)
    expected, model = steps_of_transformers(kind, tmp_path)
    log = train(tmp_path, 1, f"{COMMAND} --show-sample").log(0)
    assert "4 pairs, 4 images of " in log
    assert "not read" not in log
    assert_figures(tmp_path, expected)
    assert_weights(tmp_path, model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in FAST])
def test_a_step_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """One step alone: a router may choose another expert behind it, because of a rounding."""
    make(kind, tmp_path)
    _, model = steps_of_transformers(kind, tmp_path, 1)
    train(tmp_path, 1, COMMAND.replace("--train-iters 2", "--train-iters 1"))
    assert_weights(tmp_path, model)
