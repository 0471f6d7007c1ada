"""Reward models that learn from pairs with images: losses and steps of transformers' whole model with a linear head."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from formats.tensor import read_tensor
from megaconv.errors import UnsupportedInput
from megatron_lite.checkpoint.initial_weights import initial_weights
from megatron_lite.checkpoint.restore import open_weights
from megatron_lite.objectives.scored_model import scored
from tests.trainer.loop import test_image_pair_runs, whole_models
from tests.trainer.loop.launches import launch, train
from tests.trainer.loop.test_image_pair_runs import ANSWERS, QUESTIONS
from tests.trainer.loop.test_image_pair_runs import (
    make as make,
)  # test_image_compared_runs takes it from here
from tests.trainer.loop.test_image_pair_runs import records as records
from tests.trainer.loop.whole_models import STEPS, OfTransformers
from tests.trainer.multimodal import MODELS

pytest.importorskip("PIL.Image", reason="needs pillow")
pytestmark = pytest.mark.oracle

LR = test_image_pair_runs.LR
STD, SEED, CENTER = 0.5, 5, 0.1
COMMAND = (
    f"finetune --load hf --finetune-data data/pairs.jsonl --reward-modeling --init-method-std {STD} --seed {SEED} "
    f"--center-rewards-coefficient {CENTER} --lr {LR} --global-batch-size 4 --micro-batch-size 2 --seq-length 192 {STEPS}"
)
"""Each step has all pairs, so their order doesn't matter."""
FIGURES = ("loss", "chosen_score", "rejected_score", "score_margin", "score_accuracy")
END = "<|im_end|>\n"
"""The end of a chat, whose last token has the score."""
FAST = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava_next")
"""Models whose runs are not only among the slow tests."""
WITHOUT_CLASS = (
    "qwen3_5_moe", "glm4v_moe", "lfm2_vl", "lfm3_vl", "gemma4", "gemma4_small", "gemma4_unified", "aya_vision",
    "cohere2_vision",
)  # fmt: skip
"""Models whose language model has no class of transformers with a head of scores."""
HEAD = "score.weight"


def with_new_head(kind: str, directory: Path) -> OfTransformers:
    """transformers' whole model with the head that the run draws."""
    whole = OfTransformers(kind, directory)
    config = scored(open_weights(str(directory / "hf")).config, "hf")
    drawn = read_tensor(initial_weights(config, STD, SEED)[HEAD])
    whole.model.score = torch.nn.Linear(config.hidden, 1, bias=False)
    with torch.no_grad():
        whole.model.score.weight.copy_(torch.frombuffer(bytearray(drawn), dtype=torch.float32))
    return whole


def scores(whole: OfTransformers) -> torch.Tensor:
    """[pairs, 2]: of the chosen and the rejected answers."""
    rows = [
        torch.cat([
            whole.model.score(whole.last_hidden(question, images, answer, END)) for answer in answers
        ])
        for (question, images), answers in zip(QUESTIONS, ANSWERS, strict=True)
    ]  # fmt: skip
    return torch.stack(rows)


def step(whole: OfTransformers) -> list[float]:
    """Make a step of the Bradley-Terry loss. Returns FIGURES before it."""
    chosen, rejected = scores(whole).unbind(1)
    margins = chosen - rejected
    losses = -torch.nn.functional.logsigmoid(margins) + CENTER * (chosen + rejected) ** 2
    whole.learn(losses.mean(), LR)
    figures = (losses, chosen, rejected, margins, (margins > 0).float())
    return [figure.mean().item() for figure in figures]


def steps_of_transformers(
    kind: str, directory: Path, count: int = 2
) -> tuple[list[list[float]], Any]:
    """(FIGURES of each step, the model after them)."""
    whole = with_new_head(kind, directory)
    return [step(whole) for _ in range(count)], whole.model


def assert_figures(directory: Path, expected: list[list[float]]) -> None:
    whole_models.assert_figures(directory, FIGURES, expected)


def assert_weights(directory: Path, model: Any) -> None:
    """The language model's weights and the head are those of transformers. The original's head for words is left out."""
    trained = model.score.weight.detach()
    del model.score
    of_words = [name for name, _ in model.named_parameters() if name.endswith("lm_head.weight")]
    whole_models.assert_weights(directory, model, of_words)
    held = {}
    for path in (directory / "back").glob("*.safetensors"):
        held |= load_file(path)
    assert not [name for name in held if name.endswith("lm_head.weight")]
    assert held[HEAD].flatten().tolist() == pytest.approx(trained.flatten().tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", FAST)
def test_two_steps_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path)
    expected, model = steps_of_transformers(kind, tmp_path)
    log = train(tmp_path, 1, f"{COMMAND} --show-sample").log(0)
    assert "4 pairs, 4 images of " in log
    assert "not read" not in log
    assert_figures(tmp_path, expected)
    assert_weights(tmp_path, model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in (*FAST, *WITHOUT_CLASS)])
def test_a_step_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """One step alone: a router may choose another expert behind it, because of a rounding."""
    make(kind, tmp_path)
    _, model = steps_of_transformers(kind, tmp_path, 1)
    train(tmp_path, 1, COMMAND.replace("--train-iters 2", "--train-iters 1"))
    assert_weights(tmp_path, model)


def test_transformers_and_a_further_run_read_the_whole_reward_model(tmp_path: Path) -> None:
    """transformers has a class for Gemma 3 as a whole, which finds the last token by the token of padding."""
    import transformers

    make("gemma3", tmp_path)
    train(tmp_path, 1, COMMAND)
    megaconv.convert(
        tmp_path / "run", tmp_path / "hf-scored", saver="hf", base=tmp_path / "hf", optimizer=False
    )
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model, read = load(tmp_path / "hf-scored", dtype=torch.float32, output_loading_info=True)
    assert not any(read[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    whole = OfTransformers("gemma3", tmp_path, model)
    expected = [
        [whole.score(question, images, f"{answer}{END}") for answer in answers]
        for (question, images), answers in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    (tmp_path / "metrics.jsonl").unlink()
    further = COMMAND.replace("--load hf", "--load hf-scored").replace("--save run", "--save next")
    log = train(tmp_path, 1, further).log(0)
    assert "new:" not in log
    found = whole_models.figures(tmp_path, FIGURES[1:3])[0]
    assert found == pytest.approx(torch.tensor(expected).mean(0).tolist(), rel=1e-5, abs=1e-5)


def test_a_whole_reward_model_goes_to_megatron_as_a_language_model_alone(tmp_path: Path) -> None:
    make("qwen3_vl", tmp_path)
    train(tmp_path, 1, COMMAND)
    whole, core, back, text = (tmp_path / name for name in ("whole", "core", "back", "text"))
    megaconv.convert(tmp_path / "run", whole, saver="hf", base=tmp_path / "hf", optimizer=False)
    assert json.loads((whole / "config.json").read_text())["architectures"] == [
        "Qwen3VLForSequenceClassification"
    ]
    with pytest.raises(UnsupportedInput, match="--text-only converts its language model"):
        megaconv.convert(whole, core, saver="core")
    assert not core.exists()
    megaconv.convert(whole, core, saver="core", tp=2, text_only=True)
    megaconv.convert(core, back, saver="hf")
    megaconv.convert(tmp_path / "run", text, saver="hf", optimizer=False)
    assert megaconv.fingerprint(back) == megaconv.fingerprint(text)


def test_a_model_without_a_class_for_scores_is_refused(tmp_path: Path) -> None:
    make("aya_vision", tmp_path)
    running = launch(tmp_path, 1, COMMAND)
    assert running.wait() == [2]
    assert "no ForSequenceClassification with a head of scores for the family" in running.log(0)
    assert not (tmp_path / "run").exists()
