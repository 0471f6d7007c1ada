"""The loss of reward models: the Bradley-Terry model of pairs of answers, one chosen and one rejected.

-log sigmoid(score of the chosen answer - score of the rejected answer - margin), plus a coefficient times the square of
the scores' sum, which keeps scores near 0 (arXiv:2312.09244). Source: RewardTrainer of TRL 1.16.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.objectives.paired_rows import PairCriterion, counted_once
from megatron_lite.parallel.payload import Payload

FIGURES = ("chosen_score", "rejected_score", "score_margin", "score_accuracy")
"""Reported next to the loss, as means over pairs."""
MARGIN = "margin"
"""Name among a microbatch's extras: float32 [pairs]. Without it, all margins are 0."""


@dataclass(frozen=True)
class ScoreLoss(PairCriterion):
    """The loss of scored pairs.

    A microbatch's loss mask is 1 at the last token of each row, else 0. Its labels are unused.
    """

    figures = FIGURES

    center: float = 0.0
    """Coefficient of the squared sum of a pair's scores."""

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        assert isinstance(stage, ModelChunk)
        scores = stage.scores(given, run).squeeze(1)
        chosen, rejected = scores[0::2], scores[1::2]
        losses = pair_losses(chosen, rejected, run.extras.get(MARGIN), self.center)
        figures = {
            "loss": losses,
            "chosen_score": chosen,
            "rejected_score": rejected,
            "score_margin": chosen - rejected,
            "score_accuracy": (chosen > rejected).float(),
        }
        return losses.sum() * run.share, counted_once(figures, run)


def pair_losses(chosen: Tensor, rejected: Tensor, margins: Tensor | None, center: float) -> Tensor:
    """Return the loss of each pair. All tensors are float32 [pairs]. chosen, rejected: scores. margins: None for 0."""
    gaps = chosen - rejected
    losses = -F.logsigmoid(gaps if margins is None else gaps - margins)
    return losses + center * (chosen + rejected).square() if center else losses
