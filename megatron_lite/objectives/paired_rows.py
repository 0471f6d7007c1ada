"""The common parts of losses of pairs, whose rows are a chosen and a rejected answer, and of losses of whole answers."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megaconv.model.config import ModelConfig
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.parallel import comm
from megatron_lite.parallel.payload import Payload


class PairCriterion(Criterion):
    """A loss whose mean counts pairs."""

    trains_mtp = False
    figures: ClassVar[tuple[str, ...]]
    """Reported next to the loss, as means over pairs."""

    def loss_names(self, config: ModelConfig) -> tuple[str, ...]:
        return "loss", *self.figures

    def counts(self, batch: Microbatch) -> int:
        return len(batch.tokens) // 2


class Answers(NamedTuple):
    """The answers of a microbatch."""

    counting: Tensor
    """[rows, sequence] of this rank's tokens: 1 for labels of the answer, else 0."""
    log_probs: Tensor
    """float64 [rows]: the log-probability of each whole answer, not differentiable."""
    lengths: Tensor
    """float64 [rows]: labels of each answer."""


def measured_answers(stage: Network, given: Payload, run: Pass) -> Answers:
    """Compute the head without gradients, for a loss whose weights of labels depend on whole answers."""
    counting = run.label_weights()
    with torch.no_grad():
        _, losses = stage.label_losses(given, run.labels, counting)
    summed_losses = (losses * counting).sum(1, dtype=torch.float64)
    lengths = counting.sum(1, dtype=torch.float64)
    sums = torch.stack((summed_losses, lengths))
    if run.context is not None:
        comm.all_reduce(sums, run.context.group)
    return Answers(counting, -sums[0], sums[1])


def counted_once(figures: Mapping[str, Tensor], run: Pass) -> dict[str, Counted]:
    """Return figures [pairs] by name for the mean. All context ranks have the same pairs, so only the first counts them."""
    once = float(run.context is None or run.context.rank == 0)
    return {
        name: Counted(found.detach(), torch.full_like(found, once))
        for name, found in figures.items()
    }
