"""The loss of rated answers: Kahneman-Tversky optimization (KTO, arXiv:2402.01306), as KTOTrainer of TRL has it.

A reward is beta times the gain in log-probability over the reference. It is compared with beta times the gain of answers
to other questions, an estimate of the divergence of the model from the reference. The gradient with respect to a label's
loss is one number for each answer, as in pair_loss.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.objectives.pair_loss import REFERENCE
from megatron_lite.objectives.paired_rows import counted_once, measured_answers
from megatron_lite.parallel.payload import Payload

FIGURES = ("chosen_reward", "rejected_reward", "kl")
"""Reported next to the loss: mean rewards of good and of bad answers, and the divergence."""
GOOD, DIVERGENCE = "good", "divergence"
"""Names among a microbatch's extras, float64 [rows]: 1 for a good answer and 0 for a bad one; and the divergence of the step."""


@dataclass(frozen=True)
class Rating:
    """The options of the loss."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    """Factor of the loss of good answers."""
    undesirable_weight: float = 1.0
    """Factor of the loss of bad answers."""


@dataclass(frozen=True)
class RatedLoss(Criterion):
    """The loss of rated answers. Its mean counts answers."""

    trains_mtp = False
    options: Rating

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        return "loss", *FIGURES

    def counts(self, batch: Microbatch) -> int:
        return len(batch.tokens)

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        """See Criterion.loss. The head is computed twice, as by PairLoss."""
        answers = measured_answers(stage, given, run)
        gains = answers.log_probs - run.extras[REFERENCE]
        good, divergence = run.extras[GOOD], run.extras[DIVERGENCE]
        losses, slopes = rated(gains, good, divergence, self.options)
        weights = answers.counting * -slopes.float().unsqueeze(1) * run.share
        total, _ = stage.label_losses(given, run.labels, weights)
        rewards = self.options.beta * gains
        found = counted_once({"loss": losses, "kl": divergence}, run)
        once = found["loss"].weights
        found["chosen_reward"] = Counted(rewards, once * good)
        found["rejected_reward"] = Counted(rewards, once * (1 - good))
        return total, found


def rated(
    gains: Tensor, good: Tensor, divergence: Tensor, options: Rating
) -> tuple[Tensor, Tensor]:
    """Return (the loss of each answer, its derivative with respect to the gain), float64 [answers].

    gains: log-probabilities of answers minus the reference's. good, divergence: see above.
    """
    signs = 2 * good - 1
    strengths = options.undesirable_weight + good * (
        options.desirable_weight - options.undesirable_weight
    )
    value = torch.sigmoid(signs * options.beta * (gains - divergence))
    losses = strengths * (1 - value)
    slopes = -strengths * signs * options.beta * value * (1 - value)
    return losses, slopes
