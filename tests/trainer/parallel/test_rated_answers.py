"""KTO: ten steps of plain torch and transformers, on all weights and on adapters. test_compared_layouts.py has the layouts."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint.adapters import init_adapters
from megatron_lite.engine import Engine
from megatron_lite.inference.weights import hugging_face_tensors
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.feeder import Feeder
from megatron_lite.objectives.rated_answers import RatedAnswers, RatedFeeder
from megatron_lite.objectives.rated_loss import RatedLoss, Rating
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.config import make_settings
from megatron_lite.settings.options import LoRA
from tests.trainer.parallel.compared_cases import (
    DECAY,
    LENGTH,
    LR,
    SAMPLES,
    STEPS,
    Case,
    make_engine,
    plain_model,
    plain_update,
    weights_of,
)
from tests.trainer.parallel.compared_steps import require_figures

RATING = Rating(beta=0.5, desirable_weight=1.5, undesirable_weight=0.75)
GOOD = [(1, 0, 1, 1), (0, 0, 0, 0)]
"""The ratings of the answers of even and of odd steps."""


def arrays(step: int) -> dict[str, Tensor]:
    """The arrays of a step's batch, [SAMPLES, ...]: each question with its answer and with another one."""
    generator = torch.Generator().manual_seed(step % 2)
    rows = torch.randint(7, 99, (SAMPLES, 2, LENGTH + 1), generator=generator)
    rows[:, 1, :5] = rows[:, 0, :5]
    ends = torch.randint(6, LENGTH, (SAMPLES, 2, 1), generator=generator)
    places = torch.arange(LENGTH)
    return {
        "tokens": rows[..., :-1],
        "labels": rows[..., 1:],
        "loss_mask": ((places >= 4) & (places < ends)).float(),
        "good": torch.tensor(GOOD[step % 2], dtype=torch.float64).unsqueeze(1),
    }


def own_batch(step: int, case: Case, dp_rank: int, reference: Tensor | None) -> dict[str, Tensor]:
    """This rank's arrays, [microbatches, micro_batch_size, ...]. reference: [SAMPLES, 2]."""
    known = torch.zeros(SAMPLES, 0, dtype=torch.float64) if reference is None else reference
    whole = {**arrays(step), "reference": known}
    size = 1 if case.dp > 1 else 2
    return {
        name: array.unflatten(0, (-1, size))[dp_rank :: case.dp] for name, array in whole.items()
    }


def make(case: Case) -> Engine:
    return make_engine(case, RatedLoss(RATING))


def feeder_of(engine: Engine) -> RatedFeeder:
    grid = engine.grid
    convert = RatedAnswers().microbatch
    plain = Feeder(convert, make_settings({}), grid.device, grid.dp, grid.dp_rank)
    return RatedFeeder(**vars(plain), engine=engine, completing=plain)


def references(feeder: RatedFeeder, case: Case, step: int) -> Tensor:
    """float64 [SAMPLES, 2]"""
    batch = own_batch(step, case, feeder.dp_rank, None)
    sums = feeder.engine.log_probs(feeder.microbatches(batch))
    return sums.transpose(0, 1).reshape(-1, 2).cpu()


def microbatches(feeder: RatedFeeder, case: Case, step: int, reference: Tensor) -> list[Microbatch]:
    return next(feeder.updates(0, own_batch(step, case, feeder.dp_rank, reference)))


def train(_rank: int, case: Case) -> tuple[list[StepReport], dict[str, Tensor]]:
    engine = make(case)
    feeder = feeder_of(engine)
    known = [references(feeder, case, step) for step in range(2)]
    if case.lora is not None:
        init_adapters(engine, seed=7)
    reports = [
        engine.train_step(microbatches(feeder, case, step, known[step % 2]), LR, DECAY)
        for step in range(STEPS)
    ]
    with engine.whole_parameters():
        weights = {name: tensor.clone() for name, tensor in hugging_face_tensors(engine)}
    engine.grid.close()
    return reports, weights


def log_probs(model: Any, batch: dict[str, Tensor], row: int) -> Tensor:
    """[SAMPLES]"""
    logits = model(batch["tokens"][:, row]).logits.log_softmax(-1)
    each = logits.gather(2, batch["labels"][:, row].unsqueeze(2)).squeeze(2)
    return (each * batch["loss_mask"][:, row]).sum(1)


def plain(case: Case) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The same ten steps as one would write them, after KTOTrainer of TRL."""
    model, optimizer = plain_model(case)
    before = copy.deepcopy(model)
    found = []
    for step in range(STEPS):
        batch = arrays(step)
        with torch.no_grad():
            divergence = (log_probs(model, batch, 1) - log_probs(before, batch, 1)).mean()
            divergence = divergence.clamp(min=0)
            reference = log_probs(before, batch, 0)
        gains = log_probs(model, batch, 0) - reference
        is_good = batch["good"][:, 0] == 1
        good, bad = gains[is_good], gains[~is_good]
        of_good = 1 - torch.sigmoid(RATING.beta * (good - divergence))
        of_bad = 1 - torch.sigmoid(RATING.beta * (divergence - bad))
        weighted = RATING.desirable_weight * of_good, RATING.undesirable_weight * of_bad
        figures = plain_update(model, optimizer, torch.cat(weighted).mean())
        figures |= {"kl": divergence.item(), "rejected_reward": RATING.beta * bad.mean().item()}
        if len(good):
            figures["chosen_reward"] = RATING.beta * good.mean().item()
        found.append(figures)
    return found, weights_of(model)


def test_ten_steps_are_those_of_plain_torch() -> None:
    case = Case()
    reports, weights = train(0, case)
    expected, trained = plain(case)
    assert expected[-1]["loss"] < 0.9 * expected[1]["loss"], "something is learned"
    assert max(each["kl"] for each in expected) > 0.01
    assert [report.tokens for report in reports] == [SAMPLES] * STEPS
    require_figures(reports, expected)
    for name, tensor in trained.items():
        assert (weights[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


FURTHER = [Case(dp=4), Case(cp=2), Case(dp=2, zero=3)]
"""Cases of test_compared_layouts.py that only rated answers have."""


def test_without_training_the_divergence_and_the_rewards_are_zero() -> None:
    case = Case(lora=LoRA(4, 8))
    engine = make(case)
    feeder = feeder_of(engine)
    known = references(feeder, case, 0)
    init_adapters(engine, seed=7)
    report = engine.train_step(microbatches(feeder, case, 0, known), LR)
    assert report.others == {"chosen_reward": 0, "rejected_reward": 0, "kl": 0}
    # Half of the mean of the weights.
    assert report.loss == pytest.approx((3 * 1.5 + 0.75) / 4 / 2, rel=1e-12)
    assert report.grad_norm > 0


def test_a_step_without_good_answers_has_no_reward_of_them() -> None:
    case = Case()
    engine = make(case)
    feeder = feeder_of(engine)
    report = engine.train_step(microbatches(feeder, case, 1, references(feeder, case, 1)), LR)
    assert set(report.others) == {"rejected_reward", "kl"}
