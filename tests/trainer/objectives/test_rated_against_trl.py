"""Runs on rated answers are those of TRL's KTOTrainer: losses, gradient norms, figures and weights.

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
from tests.trainer.loop.test_rated_runs import BASE, write_rated

PYTHON = os.environ.get("TRL_PYTHON", "")
ROOT = Path(__file__).parents[3]
COUNT, STEPS, LR, BETA, GOOD, BAD = 10, 6, "5e-3", "0.5", "0.8", "1.6"
WORDS = (
    f"finetune --load {BASE} --finetune-data rated.jsonl --kto --kto-beta {BETA} --kto-desirable-weight {GOOD} "
    f"--kto-undesirable-weight {BAD} --seq-length 16 --lr {LR} --lr-decay-style constant --weight-decay 0 --clip-grad 0 "
    f"--adam-beta2 0.95 --global-batch-size {COUNT} --micro-batch-size 2 --metrics-file metrics.jsonl --log-interval 1 --fp32 "
    f"--make-vocab-size-divisible-by 2 --eval-iters 0 --train-iters {STEPS} --save ckpt"
)
NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "kl": "kl",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
}
"""Our figures -> TRL's."""


@pytest.mark.trl
@pytest.mark.skipif(not PYTHON, reason="TRL_PYTHON names no Python with trl")
@pytest.mark.parametrize("layout", ["", "--tp 2 --sequence-parallel"])
def test_losses_gradients_and_weights_are_those_of_trl(layout: str, tmp_path: Path) -> None:
    write_rated(tmp_path, COUNT)
    words = (BASE, "rated.jsonl", "theirs", STEPS, LR, BETA, GOOD, BAD)
    command = [PYTHON, "-m", "tests.trl_rated", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    logs = [log for log in json.loads((tmp_path / "theirs/logs.json").read_text()) if "loss" in log]

    train(tmp_path, 2 if layout else 1, f"{WORDS} {layout}")
    lines = [line for line in metrics(tmp_path) if "loss" in line]
    assert len(lines) == len(logs) == STEPS
    assert logs[-1]["loss"] < 0.8 * logs[0]["loss"]
    assert max(log["kl"] for log in logs) > 0.01
    for line, log in zip(lines, logs, strict=True):
        for our_name, their_name in NAMES.items():
            assert line[our_name] == pytest.approx(log[their_name], rel=1e-4, abs=1e-5), our_name

    megaconv.convert(tmp_path / "ckpt", tmp_path / "trained", saver="hf")
    found = load_file(tmp_path / "trained" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "theirs" / "model" / "model.safetensors").items():
        assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name
