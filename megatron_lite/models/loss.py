"""The head and the loss of its logits in one function.

Logits exist for a few rows at a time. The gradients are computed together with the logits.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.models.logit_loss import LogitLoss, OwnColumns, capped
from megatron_lite.parallel import comm
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.products.accumulating import add_product

CPU_ROWS = 128
"""Tokens whose logits fit into a CPU's caches."""
GPU_ROWS = 256, 16384
"""(minimum, maximum): fewer tokens leave a GPU idle, more gain nothing."""
GPU_PART = 32
"""Logits take at most 1 / GPU_PART of a GPU's memory at a time: 2,048 rows of a vocabulary of 128,256 on 80 GB."""


def rows_at_a_time(device: torch.device, columns: int, ranks: int) -> int:
    """Return the number of tokens whose logits exist at a time. columns: on each tensor rank."""
    if device.type == "cpu":
        return CPU_ROWS * ranks  # each rank has fewer columns, and a collective is expensive
    return _gpu_rows(_memory(device), columns)


def _gpu_rows(memory: int, columns: int) -> int:
    """Return a power of two. memory: bytes of the GPU.

    A logit takes 4 bytes, and its gradient in the model's dtype up to 4 more.
    """
    least, most = GPU_ROWS
    fitting = memory // GPU_PART // (8 * columns)
    power = 1 << max(fitting, 1).bit_length() - 1
    return min(most, max(least, power))


@cache
def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    loss: LogitLoss,
    vocab: int,
    rows: int,
    ranks: TensorGroup,
    cap: float | None = None,
    learned: "LearnedRows | None" = None,
) -> tuple[Tensor, Tensor]:
    """Return (sum of weights * losses, differentiable; the losses, float32 [number of losses, tokens], not differentiable).

    hidden [sequence (/ tp), batch, width]. weight [padded vocabulary / tp, width], bias [padded vocabulary / tp].
    loss: of tokens in the order of [sequence, batch]. vocab: number of columns without padding. rows: tokens at a time.
    cap: see `capped`. learned: trained rows of a frozen weight.
    """
    made: tuple[Tensor, Tensor] = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        bias,
        loss,
        vocab,
        rows,
        ranks,
        cap,
        torch.is_grad_enabled(),
        *(learned or (None, None, None)),
    )
    return made


def _slope(logits: Tensor, cap: float | None) -> Tensor | None:
    """Return the derivative of `capped` for capped logits; None if it is 1."""
    return None if cap is None else 1 - (logits / cap).square_()


class LearnedRows(NamedTuple):
    """Trained rows of a frozen weight, which has their values already."""

    rows: Tensor
    """The parameter [rows, width]."""
    held: Tensor
    """int64: the rows that this rank's part of the weight has."""
    places: Tensor
    """int64: their places in this part."""


@dataclass(frozen=True)
class _Gradients:
    """Gradients of the head's input, of its weight and of its bias. Blocks of rows are added one by one."""

    of_input: Tensor
    of_weight: Tensor | None
    """None if the weight is not trained. With several blocks it is summed in float32."""
    of_bias: Tensor | None
    """float32."""
    places: Tensor | None = None
    """The places of trained rows in a frozen weight; None if there are none."""
    of_rows: Tensor | None = None
    """The gradients of these rows, float32."""

    @classmethod
    def zeros(
        cls,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        places: Tensor | None,
        *,
        trained: bool,
        one_block: bool,
    ) -> "_Gradients":
        """places: of trained rows in a frozen weight."""
        dtype = weight.dtype if one_block else torch.float32
        of_weight = torch.zeros_like(weight, dtype=dtype) if trained else None
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        of_rows = (
            None
            if places is None
            else weight.new_zeros(len(places), weight.shape[1], dtype=torch.float32)
        )
        return cls(torch.empty_like(x), of_weight, of_bias, places, of_rows)

    def add(self, part: slice, x: Tensor, of_logits: Tensor, own: OwnColumns) -> None:
        """Add a block. x [rows, width]; of_logits float32 [rows, own columns]."""
        weight = own.weight
        if self.of_bias is not None:
            self.of_bias[: own.count] += of_logits.sum(0)
        rounded = of_logits.to(weight.dtype)
        torch.mm(rounded, weight, out=self.of_input[part])
        if self.of_weight is not None:
            add_product(self.of_weight[: own.count], rounded.t(), x)
        if self.of_rows is not None and self.places is not None:
            add_product(self.of_rows, rounded.index_select(1, self.places).t(), x)


class _HeadLoss(torch.autograd.Function):
    """The gradient of logits is available with the logits.

    So the forward pass computes the gradients of the head and of its input too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: LogitLoss,
        vocab: int,
        rows: int,
        ranks: TensorGroup,
        cap: float | None,
        backward_follows: bool,
        learned: Tensor | None,
        held_rows: Tensor | None,
        places: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        whole = comm.gathered(hidden, ranks.group) if ranks.group and ranks.sequence else hidden
        x = whole.reshape(-1, whole.shape[-1])
        own = OwnColumns.of(weight, bias, vocab, ranks)
        losses = x.new_empty(loss.count, len(x), dtype=torch.float32)
        gradients = None
        if backward_follows:
            trained, one_block = ctx.needs_input_grad[1], len(x) <= rows
            gradients = _Gradients.zeros(
                x, weight, bias, places, trained=trained, one_block=one_block
            )
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            logits = capped(F.linear(x[part], own.weight, own.bias).float(), cap)
            slope = None if gradients is None else _slope(logits, cap)
            losses[:, part], of_logits = loss.block(
                logits, part, own, ranks, backward=backward_follows
            )
            if gradients is not None and of_logits is not None:
                of_logits = of_logits if slope is None else of_logits.mul_(slope)
                gradients.add(part, x[part], of_logits, own)
        if gradients is not None:
            of_hidden = gradients.of_input.view_as(whole)
            if ranks.group:
                of_hidden = _summed(of_hidden, ranks)
            of_learned = _of_learned(gradients, learned, held_rows)
            ctx.save_for_backward(of_hidden, *_rounded(gradients, weight.dtype), of_learned)
        ctx.mark_non_differentiable(losses)
        return torch.dot(loss.combined(losses), loss.weights), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        dx, *others = ctx.saved_tensors
        dw, db, of_learned = (None if each is None else each.mul_(grad) for each in others)
        return dx.mul_(grad), dw, db, *[None] * 6, of_learned, None, None


def _rounded(gradients: _Gradients, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias in the model's dtype."""
    of_weight, of_bias = gradients.of_weight, gradients.of_bias
    return (
        None if of_weight is None else of_weight.to(dtype),
        None if of_bias is None else of_bias.to(dtype),
    )


def _of_learned(
    gradients: _Gradients, learned: Tensor | None, held: Tensor | None
) -> Tensor | None:
    """Return the gradient of the trained rows, with 0 for rows of other ranks; None without trained rows."""
    if learned is None or held is None or gradients.of_rows is None:
        return None
    return torch.zeros_like(learned).index_copy_(0, held, gradients.of_rows.to(learned.dtype))


def _summed(dx: Tensor, ranks: TensorGroup) -> Tensor:
    assert ranks.group is not None
    if ranks.sequence:
        return comm.scattered(dx, ranks.group)
    comm.all_reduce(dx, ranks.group)
    return dx
