"""DPO: ten steps of plain torch and transformers, on all weights and on adapters. test_compared_layouts.py has the layouts."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.checkpoint.adapters import init_adapters
from megatron_lite.engine import Engine
from megatron_lite.inference.weights import hugging_face_tensors
from megatron_lite.models.batch import Microbatch
from megatron_lite.objectives.pair_loss import REFERENCE, PairLoss, Preference
from megatron_lite.rank.report import StepReport
from megatron_lite.settings.options import LoRA
from tests.trainer.parallel import compared_cases
from tests.trainer.parallel.compared_cases import (
    CPU,
    DECAY,
    LENGTH,
    LR,
    SAMPLES,
    STEPS,
    make_engine,
    plain_model,
    plain_update,
    weights_of,
)
from tests.trainer.parallel.compared_steps import require_figures

SIGMOID = Preference(beta=0.5)


@dataclass(frozen=True, kw_only=True)
class Case(compared_cases.Case):
    preference: Preference = SIGMOID

    @property
    def loss(self) -> str:
        return self.preference.loss


def pairs(step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(tokens, labels, labels that count) of each pair, [2, LENGTH]: the same beginning, answers of different length, padding."""
    generator = torch.Generator().manual_seed(step % 2)
    found = []
    for _ in range(SAMPLES):
        rows = torch.randint(7, 99, (2, LENGTH + 1), generator=generator)
        rows[1, :5] = rows[0, :5]
        counting = torch.zeros(2, LENGTH)
        for row in range(2):
            counting[row, 4 : int(torch.randint(6, LENGTH, (1,), generator=generator))] = 1
        found.append((rows[:, :-1], rows[:, 1:], counting))
    return found


def make(case: Case, device: torch.device = CPU) -> Engine:
    return make_engine(case, PairLoss(case.preference), device)


def own(engine: Engine, step: int, reference: Tensor | None) -> list[Microbatch]:
    """The microbatches of this data-parallel rank, with two pairs each. reference: [pairs, 2]."""
    every = []
    for index, first in enumerate(range(0, SAMPLES, 2)):
        rows = [torch.cat(parts) for parts in zip(*pairs(step)[first : first + 2], strict=True)]
        extras = {} if reference is None else {REFERENCE: reference[first : first + 2].flatten()}
        whole = Microbatch(rows[0], rows[1], rows[2], extras=extras, index=index)
        every.append(whole.to(engine.grid.device))
    return every[engine.grid.dp_rank :: engine.grid.dp]


def references(engine: Engine, step: int) -> Tensor:
    """[pairs, 2]"""
    return engine.log_probs(own(engine, step, None)).transpose(0, 1).reshape(-1, 2)


def train(_rank: int, case: Case) -> tuple[list[StepReport], dict[str, Tensor]]:
    engine = make(case)
    known = [references(engine, step) for step in range(STEPS)]
    if case.lora is not None:
        init_adapters(engine, seed=7)
    reports = [
        engine.train_step(own(engine, step, known[step]), LR, DECAY) for step in range(STEPS)
    ]
    weights = {name: tensor.clone() for name, tensor in hugging_face_tensors(engine)}
    engine.grid.close()
    return reports, weights


def log_probs(
    model: Any, tokens: Tensor, labels: Tensor, counting: Tensor
) -> tuple[Tensor, Tensor]:
    """(summed over an answer, its length), of each row."""
    each = model(tokens).logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    return (each * counting).sum(1), counting.sum(1)


def plain(case: Case) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The same ten steps as one would write them."""
    model, optimizer = plain_model(case)
    before, options = copy.deepcopy(model), case.preference
    found = []
    for step in range(STEPS):
        losses, chosen, rejected = [], [], []
        for pair in pairs(step):
            policy, lengths = log_probs(model, *pair)
            with torch.no_grad():
                reference, _ = log_probs(before, *pair)
            gains = policy - reference
            rewards = options.beta * gains.detach()
            if not options.has_reference:
                gains = policy / lengths
                rewards = options.beta * gains.detach()
            if options.loss == "ipo":
                gains = gains / lengths
            margin, beta, smoothing = gains[0] - gains[1], options.beta, options.label_smoothing
            losses.append({
                "sigmoid": -(1 - smoothing) * F.logsigmoid(beta * margin) - smoothing * F.logsigmoid(-beta * margin),
                "hinge": torch.relu(1 - beta * margin),
                "ipo": (margin - 1 / (2 * beta)) ** 2,
                "simpo": -F.logsigmoid(beta * margin - options.gamma),
                "orpo": -gains[0] - beta * F.logsigmoid(margin - ((1 - gains[0].exp()) / (1 - gains[1].exp())).log()),
            }[options.loss])  # fmt: skip
            chosen.append(rewards[0].item())
            rejected.append(rewards[1].item())
        right = [one > other for one, other in zip(chosen, rejected, strict=True)]
        found.append({
            **plain_update(model, optimizer, torch.stack(losses).mean()),
            "chosen_reward": sum(chosen) / SAMPLES, "rejected_reward": sum(rejected) / SAMPLES,
            "reward_margin": (sum(chosen) - sum(rejected)) / SAMPLES, "reward_accuracy": sum(right) / SAMPLES,
        })  # fmt: skip
    return found, weights_of(model)


LOSSES = [
    SIGMOID,
    Preference(beta=0.5, label_smoothing=0.2),
    Preference(beta=0.5, loss="hinge"),
    Preference(beta=0.1, loss="ipo"),
    Preference(beta=0.5, loss="simpo", gamma=0.2),
    Preference(beta=0.3, loss="orpo"),
]


@pytest.mark.parametrize("preference", LOSSES, ids=str)
def test_ten_steps_are_those_of_plain_torch(preference: Preference) -> None:
    case = Case(preference=preference)
    reports, weights = train(0, case)
    expected, trained = plain(case)
    assert expected[-1]["loss"] < 0.9 * expected[0]["loss"], "something is learned"
    assert [report.tokens for report in reports] == [SAMPLES] * STEPS
    require_figures(reports, expected)
    for name, tensor in trained.items():
        assert (weights[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


FURTHER = [
    Case(cp=2, preference=Preference(beta=0.1, loss="ipo")),
    Case(cp=2, preference=Preference(beta=0.5, loss="simpo")),
    Case(tp=2, pp=2, preference=Preference(beta=0.3, loss="orpo"), lora=LoRA(4, 8)),
]
"""Cases of test_compared_layouts.py that only pairs have."""


def test_the_reference_of_adapters_is_their_base_and_at_first_nothing_is_preferred() -> None:
    case = Case(lora=LoRA(4, 8))
    engine = make(case)
    known = references(engine, 0)
    init_adapters(engine, seed=7)
    assert torch.equal(known, references(engine, 0))
    report = engine.train_step(own(engine, 0, known), LR)
    assert report.loss == pytest.approx(0.6931471805599453, rel=1e-12)
    assert report.others == {
        "chosen_reward": 0,
        "rejected_reward": 0,
        "reward_margin": 0,
        "reward_accuracy": 0,
    }
    assert report.grad_norm > 0
    assert not torch.equal(known, references(engine, 0))
