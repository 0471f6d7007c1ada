"""What each expert's matrices make of its own rows, of all experts as one step for autograd.

A loop of products on a CPU, each into its part of one result; on a GPU torch's grouped product, one kernel for all experts.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

GROUPED = hasattr(F, "grouped_mm")


def grouped_linear(x: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """x [rows, in], sorted by expert, of whom each has so many; weights [out, in] of each -> [rows, out].

    An expert without rows takes part too: its gradient is 0.
    """
    kernel = GROUPED and x.is_cuda and x.dtype == torch.bfloat16
    made: Tensor = _GroupedLinear.apply(x, list(counts), kernel, *weights)  # type: ignore[no-untyped-call]
    return made


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], kernel: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.counts, ctx.kernel = counts, kernel
        if kernel:
            made: Tensor = F.grouped_mm(x, _together(weights).transpose(1, 2), offs=_ends(counts, x.device))
            return made
        y = x.new_empty(len(x), len(weights[0]))
        for rows, weight, out in zip(torch.split(x, counts), weights, torch.split(y, counts), strict=True):
            torch.mm(rows, weight.t(), out=out)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        _, _, _, *trained = ctx.needs_input_grad
        if ctx.kernel:
            ends = _ends(ctx.counts, x.device)
            dx = F.grouped_mm(grad, _together(weights), offs=ends)
            gradients = F.grouped_mm(grad.t(), x, offs=ends).unbind() if any(trained) else trained
        else:
            dx, parts, own = torch.empty_like(x), torch.split(grad, ctx.counts), torch.split(x, ctx.counts)
            for rows, weight, out in zip(parts, weights, torch.split(dx, ctx.counts), strict=True):
                torch.mm(rows, weight, out=out)
            gradients = list(_of_weights(parts, own, trained))
        of_weights = (found if wanted else None for found, wanted in zip(gradients, trained, strict=True))
        return dx, None, None, *of_weights


def _of_weights(grads: Sequence[Tensor], rows: Sequence[Tensor], trained: Sequence[bool]) -> Iterator[Tensor | None]:
    for grad, x, wanted in zip(grads, rows, trained, strict=True):
        yield grad.t() @ x if wanted else None


def _together(weights: Sequence[Tensor]) -> Tensor:
    """[experts, out, in]: a view where they lie in a bucket at equal distances, as those of a layer do; else a copy."""
    first, *others = weights
    starts = [weight.storage_offset() for weight in weights]
    step = starts[1] - starts[0] if others else first.numel()
    storage = first.untyped_storage().data_ptr()
    even = all(
        weight.untyped_storage().data_ptr() == storage and start == starts[0] + number * step
        for number, (weight, start) in enumerate(zip(weights, starts, strict=True))
    )
    if not even or step < first.numel():
        return torch.stack(list(weights))
    return first.as_strided((len(weights), *first.shape), (step, *first.stride()))


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    """int32 [experts]: behind the last row of each."""
    ends = torch.tensor(counts, pin_memory=device.type == "cuda").cumsum(0)
    return ends.to(device, torch.int32, non_blocking=True)


class _WeightedSwiGLU(torch.autograd.Function):
    """silu(gate) * up * weight of the row, keeping nothing but its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        gate, up = x.chunk(2, -1)
        activated: Tensor = F.silu(gate).mul_(up).mul_(weights)
        return activated

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        silu, weighted = F.silu(gate), grad * weights
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)
        torch.mul(silu, weighted, out=dup)
        torch.ops.aten.silu_backward.grad_input(weighted.mul_(up), gate, grad_input=dgate)
        return dx, silu.mul_(up).mul_(grad).sum(-1, keepdim=True)


def weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
    """x [rows, gate then up], weights [rows, 1] in x's dtype -> [rows, ffn]."""
    activated: Tensor = _WeightedSwiGLU.apply(x, weights)  # type: ignore[no-untyped-call]
    return activated


class _Permuted(torch.autograd.Function):
    """Rows in another order, none left out: the gradient's are put back, not added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, inverse = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Row i is x's row order[i]; inverse is the order that undoes it."""
    found: Tensor = _Permuted.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return found
