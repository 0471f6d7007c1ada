"""GRPO's losses, gradients and weights are those of TRL's GRPOTrainer on the same completions and rewards.

TRL needs an environment of its own, whose Python TRL_PYTHON names (docs/grpo.md has the commands).
"""

import json
import os
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megaconv.checkpoint import open_checkpoint
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.inference.weights import hugging_face_tensors
from megatron_lite.objectives.policy import Completed
from megatron_lite.objectives.prompts import Prompt
from megatron_lite.objectives.rewards import Reward
from megatron_lite.objectives.rollouts import Rollouts
from megatron_lite.objectives.sampler import Completions, Sampler
from megatron_lite.parallel.grid import make_grid
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.config import Settings
from megatron_lite.settings.grpo import Grpo
from megatron_lite.settings.options import ModelOptions, OptimizerOptions

PYTHON = os.environ.get("TRL_PYTHON", "")
ROOT = Path(__file__).parents[3]
BASE = ROOT / "tests" / "fixtures" / "peft-llama-all-linear" / "base"
PROMPTS, GROUP, MOST, EOS = 4, 4, 8, 98
LR, BETAS, EPS = 5e-3, (0.9, 0.95), 1e-8

CASES = {
    "dapo": Grpo(loss_type="dapo", num_iterations=2),
    "dapo-kl-temperature": Grpo(loss_type="dapo", num_iterations=2, beta=0.3, temperature=0.7),
    "grpo": Grpo(loss_type="grpo", num_iterations=2, epsilon=0.1, epsilon_high=0.3, beta=0.1),
    "dr_grpo": Grpo(
        loss_type="dr_grpo",
        num_iterations=2,
        scale_rewards="none",
        beta=0.1,
        use_bias_correction_kl=False,
    ),
    "once-by-batch": Grpo(loss_type="grpo", scale_rewards="batch"),
    "gspo": Grpo(
        loss_type="grpo",
        num_iterations=2,
        importance_sampling_level="sequence",
        epsilon=1e-3,
        epsilon_high=2e-3,
        beta=0.1,
    ),
    "gspo-over-tokens": Grpo(
        loss_type="dapo", num_iterations=2, importance_sampling_level="sequence", epsilon=1e-3
    ),
    "cispo": Grpo(loss_type="cispo", num_iterations=2, epsilon_high=1.01, beta=0.1),
    "cispo-once": Grpo(loss_type="cispo", epsilon_high=5.0),
    "sapo": Grpo(loss_type="sapo", num_iterations=2, sapo_temperature_neg=1.5),
    "delta": Grpo(loss_type="dapo", num_iterations=2, epsilon=0.01, delta=1.03),
    "truncated": Grpo(loss_type="dapo", num_iterations=2, mask_truncated_completions=True),
    "truncated-rows": Grpo(
        loss_type="grpo",
        num_iterations=2,
        mask_truncated_completions=True,
        importance_sampling_level="sequence",
        epsilon=1e-3,
    ),
}


def completed(name: str) -> Grpo:
    return replace(
        CASES[name],
        grpo=True,
        reward=("given.py:given",),
        num_generations=GROUP,
        max_completion_length=MOST,
    )


@dataclass
class Batches:
    """Prompts and completions of different lengths, some with an end, and rewards."""

    prompts: list[list[int]] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def batches() -> list[Batches]:
    random = np.random.RandomState(3)
    found = []
    for _ in range(2):
        batch = Batches()
        for _ in range(PROMPTS):
            batch.prompts.append(random.randint(7, 90, random.randint(2, 5)).tolist())
            for _ in range(GROUP):
                length = random.randint(1, MOST + 1)
                ids = random.randint(7, 90, length).tolist()
                batch.completions.append(ids if length == MOST else [*ids[:-1], EOS])
                batch.rewards.append(float(random.randint(0, 5)))
        found.append(batch)
    return found


def described() -> dict[str, Any]:
    """The cases for the oracle."""
    cases: dict[str, Any] = {}
    for name in CASES:
        grpo = completed(name)
        cases[name] = {
            **vars(grpo),
            "epsilon_high": grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high,
            "model": str(BASE),
            "vocab": 99,
            "eos": EOS,
            "lr": LR,
            "betas": BETAS,
            "eps": EPS,
            "batches": [
                {**vars(batch), "prompts": [" ".join(map(str, ids)) for ids in batch.prompts]}
                for batch in batches()
            ],
        }
    return cases


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trl")
    (directory / "cases.json").write_text(json.dumps(described()))
    command = [PYTHON, "-m", "tests.trl_oracle", str(directory / "cases.json"), str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return directory


def make(grpo: Grpo) -> Engine:
    source = open_checkpoint(BASE)
    layout = Layout(stage_layers=(source.config.layer_count,))
    grid = make_grid(layout, 1, torch.device("cpu"))
    objective = Completed(grpo)
    options = objective.options(ModelOptions("float32", vocab_divisor=1), print)
    optimizer = OptimizerOptions(betas=BETAS, eps=EPS, clip_grad=0)
    criterion = objective.criterion(Settings(grpo=grpo))
    engine = Engine(source.config, grid, options, optimizer, criterion)
    load_weights(engine, source.tensors)
    return engine


def ours(grpo: Grpo) -> tuple[list[StepReport], dict[str, torch.Tensor]]:
    """Two batches, two prompts a microbatch."""
    engine, reference = make(grpo), make(grpo)
    given = batches()
    prompts = [Prompt("", "", np.array(ids), {}) for batch in given for ids in batch.prompts]
    rewards = [Reward("given.py:given", "given", 1.0, lambda: ())]
    sampler = Sampler(engine, SimpleNamespace(), frozenset({EOS}), rewards, grpo, 1)  # type: ignore[arg-type]
    answers = iter(given)

    def complete(_prompts: Any, _consumed: int) -> Completions:
        batch = next(answers)
        rewards = torch.tensor(batch.rewards, dtype=torch.float64).unsqueeze(1)
        return Completions(batch.completions, rewards)

    object.__setattr__(sampler, "complete", complete)
    settings = Settings(grpo=grpo)
    feeder = Rollouts(
        Completed(grpo).microbatch, settings, torch.device("cpu"), 1, 0, prompts=prompts, sampler=sampler,
        reference=reference.label_log_probs if grpo.beta else None,
    )  # fmt: skip
    reports = []
    for number in range(len(given)):
        drawn = torch.arange(number * PROMPTS, (number + 1) * PROMPTS).view(-1, 2)
        for microbatches in feeder.updates(number * PROMPTS, {"number": drawn}):
            reports.append(engine.train_step(microbatches, LR))
    return reports, dict(hugging_face_tensors(engine))


@pytest.mark.trl
@pytest.mark.skipif(not PYTHON, reason="TRL_PYTHON names no Python with trl")
@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_are_those_of_trl(name: str, theirs: Path) -> None:
    grpo = completed(name)
    reports, weights = ours(grpo)
    logs = [log for log in json.loads((theirs / name / "logs.json").read_text()) if "loss" in log]
    assert len(logs) == len(reports) == 2 * grpo.num_iterations
    for report, log in zip(reports, logs, strict=True):
        assert report.loss == pytest.approx(log["loss"], rel=1e-4, abs=2e-6)
        assert report.grad_norm == pytest.approx(log["grad_norm"], rel=1e-4)
        clipped = log.get("clip_ratio/region_mean", log.get("cispo_clip_ratio", 0.0))
        assert report.others["clip_ratio"] == pytest.approx(clipped, abs=1e-6)
        if grpo.beta:
            assert report.others["kl"] == pytest.approx(log["kl"], rel=1e-3, abs=1e-6)
    for report, log in zip(
        reports[:: grpo.num_iterations], logs[:: grpo.num_iterations], strict=True
    ):
        assert report.others["reward"] == pytest.approx(log["reward"], rel=1e-5)
        assert report.others["reward_std"] == pytest.approx(log["reward_std"], rel=1e-4)
        assert report.others["completion_length"] == pytest.approx(log["completions/mean_length"])
        assert report.others["truncated"] == pytest.approx(log["completions/clipped_ratio"])
    if grpo.num_iterations > 1 and grpo.loss_type != "sapo":
        assert any(report.others["clip_ratio"] > 0 for report in reports), "the clip is exercised"
    trained = load_file(theirs / name / "model" / "model.safetensors")
    for key, tensor in trained.items():
        assert (weights[key] - tensor).norm() <= 1e-4 * tensor.norm(), key
