"""Losses of logits. Each tensor rank has some columns of the logits, for a few tokens at a time."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from megatron_lite.parallel import comm
from megatron_lite.parallel.tensor import TensorGroup


@dataclass(frozen=True)
class OwnColumns:
    """This rank's columns of a head that are not padding."""

    first: int
    """Number of the first column in the vocabulary."""
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None, vocab: int, ranks: TensorGroup
    ) -> "OwnColumns":
        """weight, bias: of the rank. vocab: number of all ranks' columns without padding."""
        first = ranks.rank * weight.shape[0]
        count = min(max(vocab - first, 0), weight.shape[0])
        return cls(first, weight[:count], None if bias is None else bias[:count])

    @property
    def count(self) -> int:
        return len(self.weight)


class LogitLoss(Protocol):
    """One or several losses of each token. A step minimizes the weighted sum of all tokens."""

    count: ClassVar[int]
    """Number of losses of a token, each of which needs logits."""

    @property
    def weights(self) -> Tensor:
        """float32 [tokens]: the weight of each token in the sum."""

    def combined(self, losses: Tensor) -> Tensor:
        """Return each token's part of the sum, float32 [tokens]. losses [count, tokens]."""

    def block(
        self, logits: Tensor, part: slice, own: OwnColumns, ranks: TensorGroup, *, backward: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return (losses float32 [count, rows]; gradient of the weighted sum, float32 like logits).

        logits float32 [rows, own columns], whose memory may be used. part: the block's tokens. backward: False if no
        gradient is needed; it is None then. Collective over the ranks.
        """


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Limit logits to the range between minus and plus `cap` by a tanh, in place. None: no limit."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


@dataclass(frozen=True)
class CrossEntropy:
    """The cross entropy of labels."""

    labels: Tensor
    """int64 [tokens]."""
    weights: Tensor
    temperature: float = 1.0
    """Divisor of the logits."""

    count: ClassVar = 1

    def combined(self, losses: Tensor) -> Tensor:
        return losses[0]

    def block(
        self, logits: Tensor, part: slice, own: OwnColumns, ranks: TensorGroup, *, backward: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See LogitLoss."""
        if self.temperature != 1:
            logits.div_(self.temperature)
        index, held = own_labels(self.labels[part], own)
        losses, scale = _losses(logits, index, held, ranks)
        if not backward:
            return losses.unsqueeze(0), None
        weights = self.weights[part]
        if self.temperature != 1:
            weights = weights / self.temperature  # the derivative of logits / temperature
        weighted_softmax = logits.mul_((scale * weights).unsqueeze(1))
        return losses.unsqueeze(0), minus_labels(weighted_softmax, index, held * weights)


def in_rows(x: Tensor) -> Tensor:
    """Return values of tokens in the order of the head's input, [tokens]. x [batch, sequence]."""
    return x.t().reshape(-1)


def own_labels(labels: Tensor, own: OwnColumns) -> tuple[Tensor, Tensor]:
    """Return (column of each label, or 0; whether this rank has the column)."""
    local = labels - own.first
    held = (local >= 0) & (local < own.count)
    return local.masked_fill(~held, 0), held


def minus_labels(softmax: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return softmax minus the labels' weights, in place: the gradient of the cross entropy.

    softmax: with the weights as a factor already. weights [rows]: 0 for labels of other ranks' columns.
    """
    if softmax.shape[1]:
        softmax.scatter_add_(1, index.unsqueeze(1), -weights.unsqueeze(1))
    return softmax


def _losses(
    logits: Tensor, index: Tensor, held: Tensor, ranks: TensorGroup
) -> tuple[Tensor, Tensor]:
    """Return (cross entropy over the columns of all ranks, factor that turns the new logits into a softmax): float32 [rows].

    The logits are replaced by exponentials relative to this rank's maximum. One collective exchanges each rank's
    maximum, its sum of exponentials, and the label's logit.
    """
    rows, columns = logits.shape
    if columns:
        own_largest = logits.amax(1)
        picked = logits.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~held, 0)
        exponentials = logits.sub_(own_largest.unsqueeze(1)).exp_().sum(1)
    else:  # this rank has only padding
        own_largest = logits.new_full((rows,), -torch.inf)
        exponentials = logits.new_zeros(rows)
        picked = exponentials
    largest = own_largest
    if ranks.group:
        own = torch.stack((own_largest, exponentials, picked))
        all_ranks = comm.gathered(own, ranks.group).view(ranks.size, 3, -1)
        each_largest, each_sum, each_picked = all_ranks.unbind(1)
        largest = each_largest.amax(0)
        exponentials = (each_sum * (each_largest - largest).exp()).sum(0)
        picked = each_picked.sum(0)
    losses = largest + exponentials.log() - picked
    scale = (own_largest - largest).exp_() / exponentials
    return losses, scale
