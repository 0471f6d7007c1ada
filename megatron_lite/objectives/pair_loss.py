"""Losses of pairs of answers, one chosen and one rejected.

Direct preference optimization (arXiv:2305.18290), IPO (2310.12036), hinge (SLiC, 2305.10425), and without a reference
model SimPO (2405.14734) and ORPO (2403.07691). Names, smoothing and means over an answer's length follow TRL. ORPO's
cross entropy is that of the chosen answer without its question.

The loss is a function of the answers' log-probabilities, which are sums over labels. So its gradient with respect to a
label's loss is one number for each answer. The backward pass is that of a weighted sum of the labels' losses, as in
other training. But the weights are known only after the losses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.objectives.paired_rows import (
    Answers,
    PairCriterion,
    counted_once,
    measured_answers,
)
from megatron_lite.parallel.payload import Payload
from megatron_lite.settings.learning import WITH_REFERENCE

FIGURES = ("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy")
"""Reported next to the loss, as means over pairs."""
REFERENCE = "reference"
"""Name among a microbatch's extras: float64 [batch], the reference model's log-probability of each row's labels that count.

Losses without a reference have none."""
OF_MEANS = ("ipo", "simpo", "orpo")
"""Losses that compare means over an answer's tokens."""


@dataclass(frozen=True)
class Preference:
    """Direct preference optimization on pairs of answers; the chosen answer's row comes first."""

    beta: float = 0.1
    """Factor of rewards. A reward is beta times the gain in log-probability over the reference."""
    loss: str = "sigmoid"
    """`sigmoid`, `hinge`, `ipo`, `simpo` or `orpo`."""
    label_smoothing: float = 0.0
    """Probability that a pair is in the wrong order."""
    gamma: float = 0.5
    """SimPO: the margin by which the chosen answer has to win."""

    @property
    def has_reference(self) -> bool:
        return self.loss in WITH_REFERENCE


@dataclass(frozen=True)
class PairLoss(PairCriterion):
    """The loss of pairs."""

    figures = FIGURES
    options: Preference

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        """See Criterion.loss.

        The head is computed twice, because the weight of a label's loss depends on all losses of its pair.
        """
        answers = measured_answers(stage, given, run)
        reference = run.extras[REFERENCE] if self.options.has_reference else 0.0
        compared = compare(answers, reference, self.options)
        weights = answers.counting * compared.weights.unsqueeze(1) * run.share
        total, _ = stage.label_losses(given, run.labels, weights)
        return total, counted_once(compared.figures, run)


class Compared(NamedTuple):
    """The result of a comparison of pairs."""

    weights: Tensor
    """float32 [rows]: the weight of each label's loss in a row.

    With these weights, the gradients are those of the sum of all pairs' losses.
    """
    figures: dict[str, Tensor]
    """`loss` and FIGURES, float64 [pairs]."""


def compare(answers: Answers, reference: Tensor | float, options: Preference) -> Compared:
    """Compare the answers of each pair. reference: see REFERENCE; 0 without one."""
    part = torch.ones_like(answers.lengths)
    if options.loss in OF_MEANS:
        part = 1 / answers.lengths.clamp(min=1)
    likelier = answers.log_probs - reference
    gains = likelier * part
    with torch.enable_grad():  # differentiates a few numbers only, also in a pass without gradients
        gains.requires_grad_()
        loss = pair_losses(gains, options)
        (slopes,) = torch.autograd.grad(loss.sum(), gains)
    rewards = options.beta * (likelier if options.has_reference else gains.detach())
    chosen = rewards[0::2]
    rejected = rewards[1::2]
    figures = {
        "loss": loss.detach(),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": (chosen > rejected).double(),
    }
    weights = -slopes * part
    return Compared(weights.float(), figures)


def pair_losses(gains: Tensor, options: Preference) -> Tensor:
    """Return the loss of each pair.

    gains [rows]: log-probability of each answer minus the reference's, if there is one. OF_MEANS: the mean per token.
    """
    if options.loss == "orpo":
        return _odds_ratio_loss(gains[0::2], gains[1::2], options.beta)
    margins, smoothing = gains[0::2] - gains[1::2], options.label_smoothing
    if options.loss == "ipo":
        return (margins - 1 / (2 * options.beta)) ** 2
    if options.loss == "hinge":
        return torch.relu(1 - options.beta * margins)
    scaled = options.beta * margins
    if options.loss == "simpo":
        return -F.logsigmoid(scaled - options.gamma)
    return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)


def _odds_ratio_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return ORPO's loss of each pair: the cross entropy of the chosen answer, and beta times that of the ratio of odds.

    chosen, rejected [pairs]: means of log-probabilities per token.
    """
    ratio = _log_odds(chosen) - _log_odds(rejected)
    return -chosen - beta * F.logsigmoid(ratio)


def _log_odds(log_p: Tensor) -> Tensor:
    """Return log(p / (1 - p)). An answer that is certain counts as almost certain."""
    certain = log_p.clamp(max=-1e-12)
    return certain - torch.log(-torch.expm1(certain))
