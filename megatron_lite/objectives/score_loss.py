"""The loss of reward models: the Bradley-Terry model of pairs of answers, one chosen and one rejected.

-log sigmoid(score of the chosen answer - score of the rejected answer), plus a coefficient times the square of their
sum, which keeps scores near 0 (arXiv:2312.09244). Source: RewardTrainer of TRL 1.16.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.errors import NotExpressible
from megaconv.model.config import ModelConfig
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.payload import Payload

FIGURES = ("chosen_score", "rejected_score", "score_margin", "score_accuracy")
"""Reported next to the loss, as means over pairs."""


@dataclass(frozen=True)
class ScoreLoss(Criterion):
    """The loss of scored pairs. Each two consecutive rows are a chosen and a rejected answer.

    A microbatch's loss mask is 1 at the last token of each row, else 0. Its labels are unused.
    """

    center: float = 0.0
    """Coefficient of the squared sum of a pair's scores."""

    def check(self, config: ModelConfig) -> None:
        if config.mtp_layers:
            raise NotExpressible(
                "the model predicts further tokens, which can't be trained with a head of scores"
            )

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        return "loss", *FIGURES

    def counts(self, batch: Microbatch) -> int:
        return len(batch.tokens) // 2

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        assert isinstance(stage, ModelChunk)
        scores = stage.scores(given, run).squeeze(1)
        chosen, rejected = scores[0::2], scores[1::2]
        losses = pair_losses(chosen, rejected, self.center)
        figures = {
            "loss": losses,
            "chosen_score": chosen,
            "rejected_score": rejected,
            "score_margin": chosen - rejected,
            "score_accuracy": (chosen > rejected).float(),
        }
        # All context ranks have the same scores, so only the first counts them.
        once = float(run.context is None or run.context.rank == 0)
        return losses.sum() * run.share, {
            name: Counted(found.detach(), torch.full_like(found, once))
            for name, found in figures.items()
        }


def pair_losses(chosen: Tensor, rejected: Tensor, center: float) -> Tensor:
    """Return the loss of each pair. chosen, rejected: float32 [pairs], scores."""
    losses = -F.logsigmoid(chosen - rejected)
    return losses + center * (chosen + rejected).square() if center else losses
