"""Runs on rewards of answers to prompts with images: the samples and the step of transformers' whole model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import megaconv
from megatron_lite.data.images.reader import ImageReader
from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from megatron_lite.objectives.image_feeder import PLACES, ImageFeeder
from megatron_lite.objectives.policy import Completed
from megatron_lite.objectives.prompt_images import PromptImages
from megatron_lite.objectives.prompts import Prompt, PromptData, read_prompts
from megatron_lite.objectives.rollouts import padded_rows
from megatron_lite.objectives.training_data import Setup
from megatron_lite.settings.config import Settings
from megatron_lite.settings.grpo import Grpo
from tests.trainer.loop.launches import launch, metrics, train
from tests.trainer.loop.test_image_pair_runs import QUESTIONS
from tests.trainer.loop.whole_models import WORD, OfTransformers, assert_weights, message
from tests.trainer.multimodal import create, token, write_chats

pytest.importorskip("PIL.Image", reason="needs pillow")
pytestmark = pytest.mark.oracle

LR = 0.05
GENERATIONS = 3
STEP = (
    f"--train-iters 1 --global-batch-size 4 --micro-batch-size 2 --num-generations {GENERATIONS} --max-completion-length 5 "
    "--seq-length 192 --fp32 --optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0 "
    f"--lr {LR} --lr-decay-style constant --lr-warmup-iters 0 --log-interval 1 --metrics-file metrics.jsonl "
    "--distributed-timeout-minutes 1 --eval-iters 0 --save run"
)
COMMAND = f"finetune --load hf --finetune-data data/prompts.jsonl --grpo --reward rewards.py:judged {STEP}"
REWARDS = """
import json


def judged(prompts, completions, completion_ids, number, **columns):
    found = [sum(ids) % 7 / 7 + len(set(ids)) for ids in completion_ids]
    with open("seen.jsonl", "a") as file:
        for line in zip(number, completion_ids, found, prompts):
            file.write(json.dumps(line) + "\\n")
    return found
"""


def make(kind: str, directory: Path) -> None:
    create(kind, directory / "hf")
    write_chats(directory / "data")
    records = [
        {"prompt": [message("user", question)], "images": list(names), "number": number}
        for number, (question, names) in enumerate(QUESTIONS)
    ]
    lines = map(json.dumps, records)
    (directory / "data" / "prompts.jsonl").write_text("\n".join(lines))
    (directory / "rewards.py").write_text(REWARDS)


def seen(directory: Path) -> list[Any]:
    """[number of the prompt, completion, reward, prompt] of each completion."""
    return [json.loads(line) for line in (directory / "seen.jsonl").read_text().splitlines()]


def step_of_transformers(kind: str, directory: Path) -> Any:
    """The model after a step on the completions that were seen, with the loss of DAPO."""
    whole = OfTransformers(kind, directory)
    made = seen(directory)
    rewards = torch.tensor([reward for _, _, reward, _ in made]).view(-1, GENERATIONS)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    gains = [
        advantage * whole.log_probability(*QUESTIONS[number], ids)
        for (number, ids, *_), advantage in zip(made, advantages.flatten(), strict=True)
    ]
    count = sum(len(ids) for _, ids, *_ in made)
    whole.learn(-torch.stack(gains).sum() / count, LR)
    return whole.model


def require_comparable(directory: Path) -> None:
    """transformers takes each token of images in a row for a part of an image, and doesn't train the embedding of padding."""
    special = {token(WORD), token("<|endoftext|>")}
    assert not any(special & set(ids) for _, ids, *_ in seen(directory)), "take another --seed"


@pytest.mark.parametrize(("kind", "seed"), [("qwen2_5_vl", 3), ("qwen3_vl", 2), ("gemma3", 1)])
def test_a_step_is_that_of_transformers(kind: str, seed: int, tmp_path: Path) -> None:
    make(kind, tmp_path)
    log = train(tmp_path, 1, f"{COMMAND} --seed {seed}").log(0)
    assert "the encoder of hf reads the images" in log
    require_comparable(tmp_path)
    assert len(seen(tmp_path)) == 4 * GENERATIONS
    # Reward functions get the messages as the record has them, with places for images.
    assert all(
        QUESTIONS[number][0] == prompt[0]["content"] for number, *_, prompt in seen(tmp_path)
    )
    assert_weights(tmp_path, step_of_transformers(kind, tmp_path))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_completions_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """At a temperature of nearly 0, where they are the likeliest ones."""
    make(kind, tmp_path)
    train(tmp_path, 1, f"{COMMAND} --temperature 1e-4")
    whole = OfTransformers(kind, tmp_path)
    for number, ids, *_ in seen(tmp_path):
        assert whole.completion(*QUESTIONS[number], 5) == ids


@pytest.mark.parametrize(
    "more",
    [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--use-distributed-optimizer",
        "--lora-rank 4",
    ],
)
def test_a_run_at_another_layout_is_that_of_one_process(more: str, tmp_path: Path) -> None:
    """With a reference model, two updates with the same completions, and an evaluation."""
    names = ("loss", "reward", "kl", "grad_norm", "validation_loss")
    adapters = "--lora-rank 4" if "lora" in more else ""
    flags = f"--beta 0.1 --num-iterations 2 --valid-finetune-data data/prompts.jsonl --eval-interval 1 --eval-iters 1 {adapters}"
    command = COMMAND.replace("--train-iters 1", "--train-iters 2").replace("--eval-iters 0", flags)
    found = []
    for size, layout in ((1, ""), (2, "" if adapters else more)):
        directory = tmp_path / str(size)
        directory.mkdir()
        make("qwen3_vl", directory)
        train(directory, size, f"{command} {layout}")
        found.append([[line.get(name, 0.0) for name in names] for line in metrics(directory)])
    for one, other in zip(*found, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_a_completion_may_have_the_token_of_images(tmp_path: Path) -> None:
    """It is a text there: no vector of an image takes its place."""
    make("qwen2_5_vl", tmp_path)
    reader = ImageReader(tmp_path / "hf")
    prompts = tmp_path / "data" / "prompts.jsonl"
    tokenizer = HuggingFaceTokenizer(str(tmp_path / "hf"))
    one, *_ = read_prompts([str(prompts)], tokenizer, None, "--finetune-data", reader)
    objective = Completed(Grpo())
    feeder = ImageFeeder(
        objective.microbatch, Settings(), torch.device("cpu"), 1, 0, reader, None, None
    )
    images = PromptImages.of(feeder, [one])
    rows = images.added(padded_rows([one.ids], [[72, token(WORD), 73]]), [one], 1)
    count = reader.tokens(0)
    assert (rows["tokens"] == token(WORD)).sum() == count + 1
    assert rows[PLACES].sum() == count
    assert not rows[PLACES][0, len(one.ids) :].any()
    assert rows["labels"].max() < 1000


def test_the_identity_of_prompts_leaves_images_out() -> None:
    """Tables hold the bytes of all images."""
    one = Prompt("", "", np.array([1, 2]), {"answer": "a", "images": [{"bytes": b"png"}]})
    other = replace(one, columns={"answer": "a", "images": []})
    setup = cast("Setup", None)

    def identity(*prompts: Prompt) -> str:
        return PromptData(prompts, (), (), 1, 4).identity(setup)

    assert identity(one) == identity(other)
    assert identity(one) != identity(replace(one, columns={"answer": "b"}))
    assert identity(one, one) != identity(replace(one, tokens=np.array([1, 2, 1, 2])), one)


@pytest.mark.parametrize(
    ("record", "flags", "message", "status"),
    [
        ({"images": ["gone.png"]}, "--load hf", "there is no such image", 3),
        ({"images": ["0.png"], "prompt": "what?"}, "--load hf", "has images, but no messages where they could be", 3),
        ({"images": ["0.png", "1.png"]}, "--load hf", "has 2 images, and 1 more than places", 3),
        ({"images": ["0.png"]}, "--load text", "the model of this run reads text alone; --image-encoder DIRECTORY", 3),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_is_refused_in_one_line(
    record: Any, flags: str, message: str, status: int, tmp_path: Path
) -> None:
    make("qwen2_5_vl", tmp_path)
    megaconv.convert(tmp_path / "hf", tmp_path / "text", saver="hf", text_only=True)
    question = {"prompt": [{"role": "user", "content": "<image>what?"}], "number": 0}
    (tmp_path / "data" / "prompts.jsonl").write_text(json.dumps({**question, **record}))
    running = launch(tmp_path, 1, COMMAND.replace("--load hf", flags))
    assert running.wait() == [status]
    assert message in running.log(0)
    assert "Traceback" not in running.log(0)
    assert not (tmp_path / "run").exists()
