"""Losses of pairs of answers, one chosen and one rejected.

Direct preference optimization (arXiv:2305.18290), IPO (2310.12036) and hinge (SLiC, 2305.10425). Names, smoothing and
IPO's means over an answer's length follow TRL.

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
from megatron_lite.objectives.paired_rows import PairCriterion, counted_once
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import ContextGroup
from megatron_lite.parallel.payload import Payload

FIGURES = ("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy")
"""Reported next to the loss, as means over pairs."""
REFERENCE = "reference"
"""Name among a microbatch's extras: float64 [batch], the reference model's log-probability of each row's labels that count."""


@dataclass(frozen=True)
class Preference:
    """Direct preference optimization on pairs of answers; the chosen answer's row comes first."""

    beta: float = 0.1
    """Factor of rewards. A reward is beta times the gain in log-probability over the reference."""
    loss: str = "sigmoid"
    """`sigmoid`, `hinge` or `ipo`."""
    label_smoothing: float = 0.0
    """Probability that a pair is in the wrong order."""


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
        counting = run.label_weights()
        with torch.no_grad():
            _, losses = stage.label_losses(given, run.labels, counting)
        compared = compare(losses, counting, run.extras[REFERENCE], self.options, run.context)
        weights = counting * compared.weights.unsqueeze(1) * run.share
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


def compare(
    losses: Tensor,
    counting: Tensor,
    reference: Tensor,
    options: Preference,
    context: ContextGroup | None,
) -> Compared:
    """Compare the answers of each pair. losses, counting (0 or 1): [rows, sequence] of this rank's tokens.

    losses: cross entropies, not differentiable. reference: see REFERENCE.
    """
    summed_losses = (losses * counting).sum(1, dtype=torch.float64)
    lengths = counting.sum(1, dtype=torch.float64)
    sums = torch.stack((summed_losses, lengths))
    if context is not None:
        comm.all_reduce(sums, context.group)
    summed_losses, lengths = sums
    # IPO uses means per token.
    part = torch.ones_like(lengths)
    if options.loss == "ipo":
        part = 1 / lengths.clamp(min=1)
    likelier = -summed_losses - reference
    gains = likelier * part
    with torch.enable_grad():  # differentiates a few numbers only, also in a pass without gradients
        gains.requires_grad_()
        loss = pair_losses(gains, options)
        (slopes,) = torch.autograd.grad(loss.sum(), gains)
    rewards = options.beta * likelier
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

    gains [rows]: log-probability of each answer minus the reference's (ipo: the mean per token).
    """
    margins, smoothing = gains[0::2] - gains[1::2], options.label_smoothing
    if options.loss == "ipo":
        return (margins - 1 / (2 * options.beta)) ** 2
    if options.loss == "hinge":
        return torch.relu(1 - options.beta * margins)
    scaled = options.beta * margins
    return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)
