"""The common part of losses of pairs: each two consecutive rows are a chosen and a rejected answer."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.network_interface import Counted
from megatron_lite.models.passes import Pass
from megatron_lite.models.purposes import refuse_pairs


class PairCriterion(Criterion):
    """A loss whose mean counts pairs."""

    figures: ClassVar[tuple[str, ...]]
    """Reported next to the loss, as means over pairs."""

    def check(self, config: ModelConfig) -> None:
        refuse_pairs(config)

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        return "loss", *self.figures

    def counts(self, batch: Microbatch) -> int:
        return len(batch.tokens) // 2


def counted_once(figures: Mapping[str, Tensor], run: Pass) -> dict[str, Counted]:
    """Return figures [pairs] by name for the mean. All context ranks have the same pairs, so only the first counts them."""
    once = float(run.context is None or run.context.rank == 0)
    return {
        name: Counted(found.detach(), torch.full_like(found, once))
        for name, found in figures.items()
    }
