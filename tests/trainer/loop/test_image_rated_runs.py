"""Runs on rated answers to questions with images: the losses and steps of transformers' whole model."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.trainer.loop import whole_models
from tests.trainer.loop.launches import train
from tests.trainer.loop.test_image_pair_runs import QUESTIONS
from tests.trainer.loop.whole_models import STEPS, OfTransformers, assert_weights, message
from tests.trainer.multimodal import MODELS, create, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")
pytestmark = pytest.mark.oracle

LR = 0.05
BETA, DESIRABLE, UNDESIRABLE = 0.5, 1.6, 0.4
COMMAND = (
    f"finetune --load hf --finetune-data data/rated.jsonl --kto --kto-beta {BETA} --kto-desirable-weight {DESIRABLE} "
    f"--kto-undesirable-weight {UNDESIRABLE} --lr {LR} --global-batch-size 6 --micro-batch-size 3 --seq-length 192 {STEPS}"
)
"""Each step has all answers, so their order doesn't matter."""
FIGURES = ("loss", "chosen_reward", "rejected_reward", "kl")
FAST = ("qwen3_vl", "gemma3")
"""Models whose runs are not only among the slow tests."""


class Answer(NamedTuple):
    """A rated answer to one of QUESTIONS."""

    question: int
    text: str
    is_good: bool
    other: int
    """The answer to another question, from which the divergence is estimated."""


ANSWERS = (
    Answer(0, "a cat", True, other=5),
    Answer(1, "same", False, other=0),
    Answer(2, "none", True, other=1),
    Answer(3, "hi", True, other=2),
    Answer(3, "bye", False, other=2),
    Answer(3, "hello!", True, other=2),
)


def records() -> list[Any]:
    """The answers in the forms of datasets: of TRL, of whole chats, of texts, a pair, and Alpaca's."""
    first, second, third, _ = (question for question, _ in QUESTIONS)
    asked = [{**part, **({"image": "0.png"} if part["type"] == "image" else {})} for part in first]
    said = [message("assistant", answer.text) for answer in ANSWERS]
    return [
        {"prompt": [message("user", asked)], "completion": [said[0]], "label": True},
        {
            "messages": [message("user", second), said[1]],
            "images": ["1.png", "2.png"],
            "label": False,
        },
        {"prompt": [message("user", third)], "completion": "none", "label": True},
        {
            "conversations": [{"from": "human", "value": "<image>hello"}],
            "chosen": {"from": "gpt", "value": "hi"},
            "rejected": {"from": "gpt", "value": "bye"},
            "images": ["3.png"],
        },
        {"instruction": "hello", "output": "hello!", "image": "3.png", "label": True},
    ]


def make(kind: str, directory: Path) -> None:
    create(kind, directory / "hf")
    write_chats(directory / "data")
    lines = map(json.dumps, records())
    (directory / "data" / "rated.jsonl").write_text("\n".join(lines) + "\n")


def log_probabilities(whole: OfTransformers, *, others: bool) -> torch.Tensor:
    """[answers]: of the answers, or of the other answers to their questions."""
    found = []
    for answer in ANSWERS:
        question, images = QUESTIONS[answer.question]
        text = ANSWERS[answer.other].text if others else answer.text
        found.append(whole.log_probability(question, images, text))
    return torch.stack(found)


def step(
    whole: OfTransformers, reference: torch.Tensor, reference_of_others: torch.Tensor
) -> list[float]:
    """Make a step of KTO. Returns FIGURES before it."""
    with torch.no_grad():
        gains_of_others = log_probabilities(whole, others=True) - reference_of_others
    divergence = gains_of_others.mean().clamp(min=0)
    gains = log_probabilities(whole, others=False) - reference
    is_good = torch.tensor([answer.is_good for answer in ANSWERS])
    good, bad = gains[is_good], gains[~is_good]
    of_good = DESIRABLE * (1 - torch.sigmoid(BETA * (good - divergence)))
    of_bad = UNDESIRABLE * (1 - torch.sigmoid(BETA * (divergence - bad)))
    loss = torch.cat((of_good, of_bad)).mean()
    whole.learn(loss, LR)
    figures = (loss, BETA * good.mean(), BETA * bad.mean(), divergence)
    return [figure.item() for figure in figures]


def steps_of_transformers(
    kind: str, directory: Path, count: int = 2
) -> tuple[list[list[float]], Any]:
    """(FIGURES of each step, the model after them)."""
    whole = OfTransformers(kind, directory)
    with torch.no_grad():
        references = [log_probabilities(whole, others=others) for others in (False, True)]
    return [step(whole, *references) for _ in range(count)], whole.model


def assert_figures(directory: Path, expected: list[list[float]]) -> None:
    whole_models.assert_figures(directory, FIGURES, expected)


@pytest.mark.parametrize("kind", FAST)
def test_two_steps_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """In the second step, the divergence is that of other answers to the questions with their images."""
    make(kind, tmp_path)
    expected, model = steps_of_transformers(kind, tmp_path)
    assert expected[1][3] > 0.01
    log = train(tmp_path, 1, f"{COMMAND} --show-sample").log(0)
    assert "6 rated answers (4 good, 2 bad), 5 images of " in log
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
