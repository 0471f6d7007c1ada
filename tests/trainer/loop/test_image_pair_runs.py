"""Runs on pairs of answers to questions with images: the losses and steps of transformers' whole model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megaconv
from tests.trainer.loop.launches import launch, metrics, train
from tests.trainer.loop.whole_models import OfTransformers, assert_weights, message
from tests.trainer.multimodal import MODELS, create, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")
pytestmark = pytest.mark.oracle

LR = 0.05
BETA = 0.5
STEPS = (
    "--train-iters 2 --global-batch-size 4 --micro-batch-size 2 --seq-length 192 --fp32 --optimizer sgd --sgd-momentum 0 "
    f"--weight-decay 0 --clip-grad 0 --lr {LR} --lr-decay-style constant --lr-warmup-iters 0 --log-interval 1 --dpo --dpo-beta {BETA} "
    "--metrics-file metrics.jsonl --distributed-timeout-minutes 1 --save run"
)
"""Two steps. Each has all pairs, so their order doesn't matter."""
COMMAND = f"finetune --load hf --finetune-data data/pairs.jsonl {STEPS}"
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


def pairs() -> list[Any]:
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
    lines = map(json.dumps, pairs())
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
    found = [[line[name] for name in FIGURES] for line in metrics(directory) if "loss" in line]
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[:4] == pytest.approx(theirs[:4], rel=1e-5, abs=1e-5)
    assert found[-1][4] == expected[-1][4]


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


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--context-parallel-size 2"),
        (2, "--use-distributed-optimizer"),
    ],
)
def test_the_steps_are_the_same_in_every_layout(size: int, layout: str, tmp_path: Path) -> None:
    make("qwen3_vl", tmp_path)
    expected, model = steps_of_transformers("qwen3_vl", tmp_path)
    train(tmp_path, size, f"{COMMAND} {layout}")
    assert_figures(tmp_path, expected)
    assert_weights(tmp_path, model)


def test_adapters_learn_from_pairs_with_images(tmp_path: Path) -> None:
    """The encoder of another directory reads the images of a language model alone."""
    make("qwen2_5_vl", tmp_path)
    megaconv.convert(tmp_path / "hf", tmp_path / "text", saver="hf", text_only=True)
    command = f"{COMMAND} --lora-rank 4 --lr 1.0"
    train(tmp_path, 1, command)
    whole = losses(tmp_path)
    assert whole[1] < whole[0] - 0.01
    (tmp_path / "metrics.jsonl").unlink()
    other = command.replace("--load hf", "--load text --image-encoder hf")
    log = train(tmp_path, 1, other.replace("--save run", "--save other")).log(0)
    assert "the encoder of hf reads the images" in log
    assert losses(tmp_path) == whole
    megaconv.merge(tmp_path / "hf", tmp_path / "run", tmp_path / "merged")
    assert megaconv.fingerprint(tmp_path / "merged") != megaconv.fingerprint(tmp_path / "hf")


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in metrics(directory) if "loss" in line]


def test_a_run_continues_with_the_same_reference_until_an_image_changes(tmp_path: Path) -> None:
    from PIL import Image

    make("qwen2_5_vl", tmp_path)
    # One of the pairs for evaluation has no image.
    record = json.dumps(pairs()[2])
    (tmp_path / "data" / "valid.jsonl").write_text(record)
    valid = "--valid-finetune-data data/valid.jsonl --eval-interval 1"
    command = f"{COMMAND} {valid} --dpo-reference-cache kept"
    train(tmp_path, 1, command)
    whole = losses(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    again = command.replace("--save run", "--save again")
    train(tmp_path, 1, f"{again} --exit-interval 1")
    log = train(tmp_path, 1, f"{again} --resume").log(0)
    assert (
        "log-probabilities of 4 pairs for training: taken from kept/dpo-reference-training.npz"
        in log
    )
    assert losses(tmp_path) == whole
    assert megaconv.fingerprint(tmp_path / "run") == megaconv.fingerprint(tmp_path / "again")

    path = tmp_path / "data" / "0.png"
    with Image.open(path) as image:
        changed = image.point(lambda value: 255 - value)
    changed.save(path)
    log = train(tmp_path, 1, command.replace("--save run", "--save third")).log(0)
    assert "training.npz: was made with other images or their encoder; the reference" in log
    assert (
        "log-probabilities of 1 pair for validation: taken from kept/dpo-reference-validation.npz"
        in log
    )


@pytest.mark.parametrize(
    ("flags", "message", "status"),
    [
        ("--load text --dpo", "this run reads texts alone; --dpo and --kto read images too if --load or --image-encoder names", 3),
        ("--load hf --reward-modeling", "this run reads texts alone; --dpo and --kto read images too", 3),
        ("--load hf --reward-modeling --image-encoder hf", "--image-encoder is for images of chats, answers and prompts", 2),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_line(
    flags: str, message: str, status: int, tmp_path: Path
) -> None:
    make("qwen2_5_vl", tmp_path)
    megaconv.convert(tmp_path / "hf", tmp_path / "text", saver="hf", text_only=True)
    command = COMMAND.replace("--load hf", flags).replace(f"--dpo --dpo-beta {BETA}", "")
    running = launch(tmp_path, 1, command)
    assert running.wait() == [status]
    assert message in running.log(0)
    assert "Traceback" not in running.log(0)
    assert not (tmp_path / "run").exists()
