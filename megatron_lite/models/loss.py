"""The head and the cross entropy in one: logits exist for a few rows at a time, and the gradient is made along with them."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.parallel import comm
from megatron_lite.parallel.tensor import TensorGroup

CPU_ROWS = 128
"""Tokens whose logits stay in a CPU's caches."""
GPU_ROWS = 256, 16384
"""At least, at most: fewer leave a GPU idle, more gain nothing."""
GPU_PART = 256
"""Of a GPU's memory, the part that logits take at one time."""


def rows_at_a_time(device: torch.device, columns: int, ranks: int) -> int:
    """Tokens whose logits exist together, of so many columns on each tensor rank."""
    if device.type == "cpu":
        return CPU_ROWS * ranks  # each rank has fewer columns then, and a collective is dear
    return _gpu_rows(_memory(device), columns)


def _gpu_rows(memory: int, columns: int) -> int:
    """A multiple of the least. memory: bytes of the GPU. A logit takes 4 bytes, and its gradient in the model's dtype up to 4 more."""
    least, most = GPU_ROWS
    fitting = memory // GPU_PART // (8 * columns)
    return min(most, max(least, fitting // least * least))


@cache
def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    vocab: int,
    rows: int,
    ranks: TensorGroup,
) -> tuple[Tensor, Tensor]:
    """(sum of weights * losses, to go backward from; the losses alone, float32 [tokens], without a gradient).

    hidden [sequence (/ tp), batch, width]. weight [padded vocabulary / tp, width], bias [padded vocabulary / tp]. labels int64
    [tokens] and weights float32 [tokens], tokens in the order of [sequence, batch]. vocab: columns that are no padding.
    rows: tokens at a time.
    """
    made: tuple[Tensor, Tensor] = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, weights, vocab, rows, ranks, torch.is_grad_enabled()
    )
    return made


class _HeadLoss(torch.autograd.Function):
    """Softmax minus one-hot is at hand while the logits are, so both gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        vocab: int,
        rows: int,
        ranks: TensorGroup,
        backward_follows: bool,
    ) -> tuple[Tensor, Tensor]:
        whole = comm.gathered(hidden, ranks.group) if ranks.group and ranks.sequence else hidden
        x = whole.reshape(-1, whole.shape[-1])
        first = ranks.rank * weight.shape[0]
        own = min(max(vocab - first, 0), weight.shape[0])
        used = weight[:own]
        losses = x.new_empty(len(x), dtype=torch.float32)
        if backward_follows:
            dx = torch.empty_like(x)
            trained = ctx.needs_input_grad[1]
            dw = torch.zeros_like(weight, dtype=weight.dtype if len(x) <= rows else torch.float32) if trained else None
            db = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            logits = F.linear(x[part], used, None if bias is None else bias[:own]).float()
            index, held = _own_labels(labels[part], first, own)
            losses[part], scale = _losses(logits, index, held, ranks)
            if backward_follows:
                grad = logits.mul_((scale * weights[part]).unsqueeze(1))
                if own:
                    grad.scatter_add_(1, index.unsqueeze(1), -(held * weights[part]).unsqueeze(1))
                if db is not None:
                    db[:own] += grad.sum(0)
                grad = grad.to(weight.dtype)
                torch.mm(grad, used, out=dx[part])
                if dw is None:
                    continue
                if dw.dtype == grad.dtype:
                    dw[:own].addmm_(grad.t(), x[part])
                else:
                    dw[:own] += grad.t() @ x[part]
        total = torch.dot(losses, weights)
        if backward_follows:
            dx = dx.view_as(whole)
            if ranks.group:
                dx = _summed(dx, ranks)
            of_weight, of_bias = (None if each is None else each.to(weight.dtype) for each in (dw, db))
            ctx.save_for_backward(dx, of_weight, of_bias)
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        dx, *others = ctx.saved_tensors
        dw, db = (None if each is None else each.mul_(grad) for each in others)
        return dx.mul_(grad), dw, db, None, None, None, None, None, None


def _summed(dx: Tensor, ranks: TensorGroup) -> Tensor:
    assert ranks.group is not None
    if ranks.sequence:
        return comm.scattered(dx, ranks.group)
    comm.all_reduce(dx, ranks.group)
    return dx


def _own_labels(labels: Tensor, first: int, own: int) -> tuple[Tensor, Tensor]:
    """(column of each label, or 0; whether this rank has it)."""
    local = labels - first
    held = (local >= 0) & (local < own)
    return local.masked_fill(~held, 0), held


def _losses(logits: Tensor, index: Tensor, held: Tensor, ranks: TensorGroup) -> tuple[Tensor, Tensor]:
    """(cross entropy over the columns of all ranks, what makes softmax of the new logits), each float32 [rows].

    Logits become exponentials, below this rank's maximum. One collective: each rank's maximum, its sum of exponentials
    and the label's logit.
    """
    if logits.shape[1]:
        own_largest = logits.amax(1)
        picked = logits.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~held, 0)
        exponentials = logits.sub_(own_largest.unsqueeze(1)).exp_().sum(1)
    else:  # nothing but padding on this rank
        own_largest = logits.new_full((len(logits),), -torch.inf)
        exponentials = picked = logits.new_zeros(len(logits))
    largest = own_largest
    if ranks.group:
        all_ranks = comm.gathered(torch.stack((own_largest, exponentials, picked)), ranks.group).view(ranks.size, 3, -1)
        largest = all_ranks[:, 0].amax(0)
        exponentials = (all_ranks[:, 1] * (all_ranks[:, 0] - largest).exp()).sum(0)
        picked = all_ranks[:, 2].sum(0)
    return largest + exponentials.log() - picked, (own_largest - largest).exp_() / exponentials
