"""The predictions of a teacher, and the loss of a student that learns them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.models.divergence import divergence_of
from megatron_lite.models.logit_loss import OwnColumns, capped, minus_labels, own_labels
from megatron_lite.parallel import comm
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.settings.options import Distillation


@dataclass(frozen=True)
class Teaching:
    """A teacher's predictions of a microbatch, before its head computes them, and the head."""

    hidden: Tensor
    """[sequence (/ tp), batch, the teacher's width]: the input of its head."""
    weight: Tensor
    """[padded vocabulary / tp, the teacher's width]."""
    bias: Tensor | None
    """[padded vocabulary / tp]."""
    cap: float | None
    """See capped."""

    def rows(self, ranks: TensorGroup) -> Tensor:
        """Return the input of its head, [tokens, the teacher's width]. Collective under sequence parallelism."""
        whole = (
            comm.gathered(self.hidden, ranks.group)
            if ranks.group and ranks.sequence
            else self.hidden
        )
        return whole.reshape(-1, whole.shape[-1])


@dataclass(frozen=True)
class Distilled:
    """Two losses: the cross entropy of labels, and the divergence of the student's predictions from the teacher's.

    The divergence has the square of the temperature as a factor, so that its gradient keeps its size (arXiv 1503.02531).
    """

    labels: Tensor
    """int64 [tokens]."""
    weights: Tensor
    """float32 [tokens]."""
    hidden: Tensor
    """[tokens, the teacher's width]."""
    teaching: Teaching
    options: Distillation

    count: ClassVar = 2

    def combined(self, losses: Tensor) -> Tensor:
        """See LogitLoss."""
        cross_entropy, divergence = losses
        return combined(cross_entropy, divergence, self.options)

    def block(
        self, logits: Tensor, part: slice, own: OwnColumns, ranks: TensorGroup, *, backward: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See LogitLoss."""
        alpha, temperature = self.options.alpha, self.options.temperature
        measure = divergence_of(self.options.beta)
        index, held = own_labels(self.labels[part], own)
        student = logits / temperature
        teacher = self._taught(part, own).div_(temperature)
        of_labels, of_student, of_teacher = _log_sums((logits, student, teacher), ranks)
        log_p = student.sub_(of_student.unsqueeze(1))
        log_q = teacher.sub_(of_teacher.unsqueeze(1))
        own_sums = _picked(logits, index, held), *measure.sums(log_p, log_q)
        picked, *sums = _over_ranks(torch.stack(own_sums), ranks)
        divergence = measure.value(sums) * temperature**2
        losses = torch.stack((of_labels - picked, divergence))
        if not backward:
            return losses, None
        weights = self.weights[part]
        of_logits = measure.gradient(log_p, log_q, sums)
        of_logits *= (weights * (alpha * temperature)).unsqueeze(1)
        if alpha < 1:
            log_softmax = logits.sub_(of_labels.unsqueeze(1))
            of_logits += _of_cross_entropy(log_softmax, index, held, weights * (1 - alpha))
        return losses, of_logits

    def _taught(self, part: slice, own: OwnColumns) -> Tensor:
        """Return the teacher's logits of a block, float32 [rows, own columns]."""
        teaching = self.teaching
        bias = None if teaching.bias is None else teaching.bias[: own.count]
        logits = F.linear(self.hidden[part], teaching.weight[: own.count], bias)
        return capped(logits.float(), teaching.cap)


def combined(cross_entropy: Tensor, divergence: Tensor, options: Distillation) -> Tensor:
    """Return the loss of a student, [tokens] or of another shape that both have."""
    return torch.lerp(cross_entropy, divergence, options.alpha)


def _of_cross_entropy(log_softmax: Tensor, index: Tensor, held: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of the weighted cross entropy, in the memory of log_softmax. weights: [rows]."""
    softmax = log_softmax.exp_().mul_(weights.unsqueeze(1))
    return minus_labels(softmax, index, held * weights)


def _log_sums(tables: Sequence[Tensor], ranks: TensorGroup) -> Tensor:
    """Return the logarithms of the sums of exponentials over all ranks' columns, float32 [tables, rows]. tables: [rows, own columns]."""
    own = torch.stack([table.logsumexp(1) for table in tables])
    if not ranks.group:
        return own
    of_all = comm.gathered(own, ranks.group).view(ranks.size, *own.shape)
    return of_all.logsumexp(0)


def _picked(logits: Tensor, index: Tensor, held: Tensor) -> Tensor:
    """Return the logits of labels, float32 [rows]; 0 if another rank has them."""
    if not logits.shape[1]:  # this rank has only padding
        return logits.new_zeros(len(logits))
    return logits.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~held, 0)


def _over_ranks(sums: Tensor, ranks: TensorGroup) -> Tensor:
    if ranks.group:
        comm.all_reduce(sums, ranks.group)
    return sums
