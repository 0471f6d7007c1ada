"""Losses of pairs of answers, one chosen and one rejected: direct preference optimization (arXiv:2305.18290), IPO (2310.12036), hinge
(SLiC, 2305.10425). Names, smoothing and IPO's means over an answer's length are TRL's.

Such a loss is a function of whole answers' log-probabilities, that is of sums over labels. So its gradient with respect to a label's
loss is a number for each answer, and what goes backward is a weighted sum of the labels' losses as anywhere else; only that the weights
are known after the losses are.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.parallel import comm
from megatron_lite.parallel.context import ContextGroup
from megatron_lite.settings.options import Preference

FIGURES = ("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy")
"""What is reported beside the loss, as means over pairs."""
LOSSES = ("loss", *FIGURES)


class Compared(NamedTuple):
    weights: Tensor
    """float32 [rows]: what the loss of each of a row's labels counts for, so that gradients are those of the sum of all pairs' losses."""
    figures: dict[str, Tensor]
    """`loss` and FIGURES, float64 [pairs]."""


def compare(
    losses: Tensor, counting: Tensor, reference: Tensor, options: Preference, context: ContextGroup | None
) -> Compared:
    """losses, counting (0 or 1) [rows, sequence]: of this rank's tokens, cross entropies without a gradient. reference: see Microbatch."""
    sums = torch.stack(((losses * counting).sum(1, dtype=torch.float64), counting.sum(1, dtype=torch.float64)))
    if context is not None:
        comm.all_reduce(sums, context.group)
    part = 1 / sums[1].clamp(min=1) if options.loss == "ipo" else torch.ones_like(sums[1])
    likelier = -sums[0] - reference
    gains = likelier * part
    with torch.enable_grad():  # of a few numbers, whatever the pass itself is for
        gains.requires_grad_()
        loss = pair_losses(gains, options)
        (slopes,) = torch.autograd.grad(loss.sum(), gains)
    rewards = options.beta * likelier
    chosen, rejected = rewards[0::2], rewards[1::2]
    figures = (chosen, rejected, chosen - rejected, (chosen > rejected).double())
    return Compared((-slopes * part).float(), {"loss": loss.detach(), **dict(zip(FIGURES, figures, strict=True))})


def pair_losses(gains: Tensor, options: Preference) -> Tensor:
    """gains [rows]: by how much the log-probability of each answer lies above the reference's (of ipo: a token's, on the mean)."""
    margins, smoothing = gains[0::2] - gains[1::2], options.label_smoothing
    if options.loss == "ipo":
        return (margins - 1 / (2 * options.beta)) ** 2
    if options.loss == "hinge":
        return torch.relu(1 - options.beta * margins)
    scaled = options.beta * margins
    return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)
