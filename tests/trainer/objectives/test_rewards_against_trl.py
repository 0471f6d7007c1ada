"""Runs of reward modeling are those of TRL's RewardTrainer: losses, gradient norms, figures and weights, also of adapters.

TRL needs an environment of its own, whose Python TRL_PYTHON names (docs/grpo.md has the commands).
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megaconv
from tests.trainer.loop.launches import metrics, train
from tests.trainer.loop.test_reward_runs import (
    BASE,
    COUNT,
    MARGINS,
    WORDS,
    merge_reward_model,
    scores_of_transformers,
    write_pairs,
)

PYTHON = os.environ.get("TRL_PYTHON", "")
ROOT = Path(__file__).parents[3]
STEPS, END, LR = 6, 98, "5e-3"
COMMAND = WORDS.replace("--lr 1e-2", f"--lr {LR}")
UNTRAINED = COMMAND.replace(f"--lr {LR}", "--lr 1e-12") + " --train-iters 1 --save ckpt"
OPTIMIZER = "--adam-beta2 0.999 --adam-eps 1e-5 --weight-decay 0 --clip-grad 0"
EVALUATED = f"--valid-finetune-data pairs.jsonl --eval-interval {STEPS}"
NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "score_margin": "margin",
    "score_accuracy": "accuracy",
}
"""Our figures -> TRL's."""
CHOSEN = [[n, 2, 3, n, 4, END] for n in range(7, 7 + COUNT)]
REJECTED = [[n, 2, n, 5, END] for n in range(7, 7 + COUNT)]

pytestmark = [
    pytest.mark.trl,
    pytest.mark.skipif(not PYTHON, reason="TRL_PYTHON names no Python with trl"),
]


def run_script(*words: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"}
    ran = subprocess.run(
        [PYTHON, "-m", "tests.trl_rewards", *map(str, words)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def write_for_trl(file: Path, *, margins: bool) -> Path:
    pairs: dict[str, Any] = {"chosen_ids": CHOSEN, "rejected_ids": REJECTED}
    if margins:
        pairs["margin"] = MARGINS
    file.write_text(json.dumps(pairs))
    return file


def assert_same_figures(ours: Path, theirs: Path) -> None:
    """Training, and an evaluation after the last step."""
    found = metrics(ours)
    lines = [line for line in found if "loss" in line]
    (evaluated,) = (line for line in found if "validation_loss" in line)
    logs = [log for log in json.loads((theirs / "logs.json").read_text()) if "loss" in log]
    assert len(lines) == len(logs) == STEPS
    assert logs[-1]["loss"] < 0.8 * logs[0]["loss"]
    for line, log in zip(lines, logs, strict=True):
        for our_name, their_name in NAMES.items():
            assert line[our_name] == pytest.approx(log[their_name], rel=1e-4, abs=1e-6), our_name
        mean = (line["chosen_score"] + line["rejected_score"]) / 2
        assert mean == pytest.approx(log["mean_reward"], rel=1e-4, abs=1e-4)
    expected = json.loads((theirs / "evaluated.json").read_text())
    for our_name, their_name in NAMES.items():
        if our_name != "grad_norm":
            value = expected[f"eval_{their_name}"]
            assert evaluated[f"validation_{our_name}"] == pytest.approx(value, rel=1e-4, abs=1e-6)


def assert_same_weights(ours: Path, theirs: Path) -> None:
    found, expected = load_file(ours), load_file(theirs)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


@pytest.mark.parametrize(("coefficient", "margins"), [("0", False), ("0.05", True)])
def test_losses_gradients_and_weights_are_those_of_trl(
    coefficient: str, margins: bool, tmp_path: Path
) -> None:
    first, model = tmp_path / "first", tmp_path / "model"
    write_pairs(first)
    train(first, 1, f"{UNTRAINED} --load {BASE}")
    megaconv.convert(first / "ckpt", model, saver="hf")

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    pairs = write_for_trl(tmp_path / "pairs.json", margins=margins)
    run_script("train", model, pairs, theirs, STEPS, LR, coefficient)
    write_pairs(ours, MARGINS if margins else None)
    layout = "--tp 2 --sequence-parallel"
    flags = f"{OPTIMIZER} {EVALUATED} {layout} --center-rewards-coefficient {coefficient}"
    train(ours, 2, f"{COMMAND} {flags} --load {model} --save ckpt --train-iters {STEPS}")
    assert_same_figures(ours, theirs)
    megaconv.convert(ours / "ckpt", tmp_path / "trained", saver="hf")
    weights = tmp_path / "trained" / "model.safetensors"
    assert_same_weights(weights, theirs / "model" / "model.safetensors")


def test_adapters_and_their_head_are_those_of_trl_and_peft_loads_them(tmp_path: Path) -> None:
    first, ours, theirs = (tmp_path / name for name in ("first", "ours", "theirs"))
    write_pairs(first)
    train(first, 1, f"{UNTRAINED} --load {BASE} --lora-rank 4")
    start = first / "ckpt" / "iter_0000001"
    pairs = write_for_trl(tmp_path / "pairs.json", margins=True)
    run_script("train", BASE, pairs, theirs, STEPS, LR, 0, start)

    write_pairs(ours, MARGINS)
    command = f"{COMMAND} {OPTIMIZER} {EVALUATED} --load {BASE} --lora-load {start} --save ckpt"
    train(ours, 4, f"{command} --train-iters {STEPS} --tp 2 --sequence-parallel --pp 2")
    assert_same_figures(ours, theirs)
    saved = ours / "ckpt" / f"iter_{STEPS:07}"
    name = "adapter_model.safetensors"
    assert_same_weights(saved / name, theirs / "model" / name)

    rows = [row[:-1] for row in CHOSEN + REJECTED]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    of_peft = json.loads(run_script("scores", BASE, saved, tmp_path / "rows.json"))
    merge_reward_model(ours / "ckpt", STEPS, tmp_path / "merged")
    merged = scores_of_transformers(tmp_path / "merged", rows)
    assert torch.tensor(of_peft).std() > 0.1
    assert of_peft == pytest.approx(merged, rel=1e-4, abs=1e-5)
