"""Runs of reward modeling are those of TRL's RewardTrainer: losses, gradient norms, figures and weights.

TRL needs an environment of its own, whose Python TRL_PYTHON names (docs/grpo.md has the commands).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

import megaconv
from tests.trainer.loop.launches import metrics, train
from tests.trainer.loop.test_reward_runs import BASE, COUNT, WORDS, write_pairs

PYTHON = os.environ.get("TRL_PYTHON", "")
ROOT = Path(__file__).parents[3]
STEPS, END, LR = 6, 98, "5e-3"
COMMAND = WORDS.replace("--lr 1e-2", f"--lr {LR}")
OPTIMIZER = "--adam-beta2 0.999 --adam-eps 1e-5 --weight-decay 0 --clip-grad 0"
NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "score_margin": "margin",
    "score_accuracy": "accuracy",
}
"""Our figures -> TRL's."""


@pytest.mark.trl
@pytest.mark.skipif(not PYTHON, reason="TRL_PYTHON names no Python with trl")
@pytest.mark.parametrize("coefficient", ["0", "0.05"])
def test_losses_gradients_and_weights_are_those_of_trl(coefficient: str, tmp_path: Path) -> None:
    first, model = tmp_path / "first", tmp_path / "model"
    write_pairs(first)
    untrained = COMMAND.replace(f"--lr {LR}", "--lr 1e-12")
    train(first, 1, f"{untrained} --load {BASE} --save ckpt --train-iters 1")
    megaconv.convert(first / "ckpt", model, saver="hf")

    pairs = {
        "chosen_ids": [[n, 2, 3, n, 4, END] for n in range(7, 7 + COUNT)],
        "rejected_ids": [[n, 2, n, 5, END] for n in range(7, 7 + COUNT)],
    }
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    theirs = tmp_path / "theirs"
    words = [str(model), str(tmp_path / "pairs.json"), str(theirs), str(STEPS), LR, coefficient]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"}
    ran = subprocess.run(
        [PYTHON, "-m", "tests.trl_rewards", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]

    ours = tmp_path / "ours"
    write_pairs(ours)
    train(
        ours,
        2,
        f"{COMMAND} {OPTIMIZER} --load {model} --save ckpt --train-iters {STEPS} --tp 2 --sequence-parallel "
        f"--center-rewards-coefficient {coefficient}",
    )
    lines = [line for line in metrics(ours) if "loss" in line]
    logs = [log for log in json.loads((theirs / "logs.json").read_text()) if "loss" in log]
    assert len(lines) == len(logs) == STEPS
    assert logs[-1]["loss"] < 0.5 * logs[0]["loss"]
    for line, log in zip(lines, logs, strict=True):
        for our_name, their_name in NAMES.items():
            assert line[our_name] == pytest.approx(log[their_name], rel=1e-4, abs=1e-6), our_name
        mean = (line["chosen_score"] + line["rejected_score"]) / 2
        assert mean == pytest.approx(log["mean_reward"], rel=1e-4, abs=1e-4)
    megaconv.convert(ours / "ckpt", tmp_path / "trained", saver="hf")
    weights = load_file(tmp_path / "trained" / "model.safetensors")
    for name, tensor in load_file(theirs / "model" / "model.safetensors").items():
        assert (weights[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
