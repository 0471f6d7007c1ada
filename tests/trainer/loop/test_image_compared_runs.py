"""What runs on pairs and on rated answers with images have in common: layouts, adapters, the reference, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import megaconv
from tests.trainer.loop import test_image_pair_runs, test_image_rated_runs, test_image_scored_runs
from tests.trainer.loop.launches import launch, train
from tests.trainer.loop.whole_models import all_figures, figures

pytest.importorskip("PIL.Image", reason="needs pillow")
pytestmark = pytest.mark.oracle

RUNS: dict[str, Any] = {
    "dpo": test_image_pair_runs,
    "kto": test_image_rated_runs,
    "reward-modeling": test_image_scored_runs,
}
LAYOUTS = (
    "--pipeline-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--context-parallel-size 2",
    "--use-distributed-optimizer",
)
SLOW = [("kto", layout) for layout in ("--tensor-model-parallel-size 2", *LAYOUTS[1:])]


@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        *(("dpo", layout) for layout in LAYOUTS),
        ("kto", LAYOUTS[0]),
        *(("reward-modeling", layout) for layout in LAYOUTS),
        *(pytest.param(*slow, marks=pytest.mark.slow) for slow in SLOW),
    ],
)
def test_the_steps_are_the_same_in_every_layout(
    objective: str, layout: str, tmp_path: Path
) -> None:
    runs = RUNS[objective]
    runs.make("qwen3_vl", tmp_path)
    expected, model = runs.steps_of_transformers("qwen3_vl", tmp_path)
    train(tmp_path, 2, f"{runs.COMMAND} {layout}")
    runs.assert_figures(tmp_path, expected)
    runs.assert_weights(tmp_path, model)


@pytest.mark.parametrize(
    ("objective", "lr"), [("dpo", 1.0), ("kto", 1.0), ("reward-modeling", 0.002)]
)
def test_adapters_learn_from_answers_with_images(objective: str, lr: float, tmp_path: Path) -> None:
    """The encoder of another directory reads the images of a language model alone."""
    runs = RUNS[objective]
    runs.make("qwen2_5_vl", tmp_path)
    megaconv.convert(tmp_path / "hf", tmp_path / "text", saver="hf", text_only=True)
    command = f"{runs.COMMAND} --lora-rank 4 --lr {lr}"
    train(tmp_path, 1, command)
    (first, *_), (second, *_) = whole = figures(tmp_path, runs.FIGURES)
    assert second < first - 0.01
    (tmp_path / "metrics.jsonl").unlink()
    other = command.replace("--load hf", "--load text --image-encoder hf")
    log = train(tmp_path, 1, other.replace("--save run", "--save other")).log(0)
    assert "the encoder of hf reads the images" in log
    assert figures(tmp_path, runs.FIGURES) == whole
    merge(objective, tmp_path)
    assert megaconv.fingerprint(tmp_path / "merged") != megaconv.fingerprint(tmp_path / "hf")


def merge(objective: str, directory: Path) -> None:
    """Merge the run's adapter into the original, as docs/images.md has it."""
    original, adapter, merged = (directory / name for name in ("hf", "run", "merged"))
    if objective == "reward-modeling":
        megaconv.convert(
            original, merged, saver="hf", text_only=True, adapters=[adapter], base=original
        )
    else:
        megaconv.merge(original, adapter, merged)


@pytest.mark.parametrize(
    ("objective", "valid", "measured", "evaluated"),
    [
        # The pair for evaluation has no image. The image that changes is in none of the rated answers for evaluation.
        ("dpo", slice(2, 3), "4 pairs", "1 pair"),
        ("kto", slice(2), "6 rated answers", "2 rated answers"),
    ],
)
def test_a_run_continues_with_the_same_reference_until_an_image_changes(
    objective: str, valid: slice, measured: str, evaluated: str, tmp_path: Path
) -> None:
    from PIL import Image

    runs = RUNS[objective]
    runs.make("qwen2_5_vl", tmp_path)
    lines = map(json.dumps, runs.records()[valid])
    (tmp_path / "data" / "valid.jsonl").write_text("\n".join(lines))
    with_valid = f"{runs.COMMAND} --valid-finetune-data data/valid.jsonl --eval-interval 1"
    command = f"{with_valid} --{objective}-reference-cache kept"
    log = train(tmp_path, 1, command).log(0)
    assert "validation loss" in log
    names = (*runs.FIGURES, "step")
    whole = all_figures(tmp_path, names)
    (tmp_path / "metrics.jsonl").unlink()
    again = command.replace("--save run", "--save again")
    train(tmp_path, 1, f"{again} --exit-interval 1")
    log = train(tmp_path, 1, f"{again} --resume").log(0)
    kept = f"taken from kept/{objective}-reference"
    assert f"of {measured} for training: {kept}-training.npz" in log
    assert all_figures(tmp_path, names) == whole
    assert megaconv.fingerprint(tmp_path / "run") == megaconv.fingerprint(tmp_path / "again")

    path = tmp_path / "data" / "3.png"
    with Image.open(path) as image:
        changed = image.point(lambda value: 255 - value)
    changed.save(path)
    log = train(tmp_path, 1, command.replace("--save run", "--save third")).log(0)
    assert "training.npz: was made with other images or their encoder; the reference" in log
    assert f"of {evaluated} for validation: {kept}-validation.npz" in log


@pytest.mark.parametrize(
    ("objective", "flags", "message", "status"),
    [
        ("dpo", "--load text --dpo", "this run reads texts alone; it reads images too if --load or --image-encoder names", 3),
        ("kto", "--load text --kto", "data/rated.jsonl:1: has images, and this run reads texts alone; it reads images", 3),
        ("reward-modeling", "--load text", "data/pairs.jsonl:1: has images, and this run reads texts alone; it reads", 3),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_line(
    objective: str, flags: str, message: str, status: int, tmp_path: Path
) -> None:
    runs = RUNS[objective]
    runs.make("qwen2_5_vl", tmp_path)
    megaconv.convert(tmp_path / "hf", tmp_path / "text", saver="hf", text_only=True)
    words = runs.COMMAND.replace("--load hf", flags)
    selected = words.replace(f"--dpo --dpo-beta {test_image_pair_runs.BETA}", "")
    running = launch(tmp_path, 1, selected)
    assert running.wait() == [status]
    assert message in running.log(0)
    assert "Traceback" not in running.log(0)
    assert not (tmp_path / "run").exists()
