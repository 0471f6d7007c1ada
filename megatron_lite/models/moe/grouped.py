"""Products of each expert's matrix with its own rows, for all experts as one step of autograd.

On a CPU, a loop of products that write into one result. On a GPU, torch's grouped product: one kernel for all experts.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.products.accumulating import GradientSum
from megatron_lite.products.product import PLAIN

GROUPED = hasattr(F, "grouped_mm")
MULTIPLE = 8
"""Elements of bf16 in 16 bytes."""


def grouped_linear(x: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """x [rows, in] sorted by expert, weights [out, in] of each expert, counts: rows of each expert -> [rows, out].

    An expert without rows is included too: its gradient is 0. So it is if there are no rows at all, for which torch's
    grouped product has no kernel.
    """
    kernel = takes_kernel(x, len(weights[0]))
    made: Tensor = _GroupedLinear.apply(x, list(counts), kernel, *weights)  # type: ignore[no-untyped-call]
    return made


def takes_kernel(x: Tensor, out: int) -> bool:
    """Return whether torch's grouped product computes x [rows, in] -> [rows, out]: bf16 on a GPU, and at least one row.

    The kernel reads rows that begin at multiples of 16 bytes.
    """
    aligned = x.shape[1] % MULTIPLE == 0 and out % MULTIPLE == 0
    return GROUPED and len(x) > 0 and x.is_cuda and x.dtype == torch.bfloat16 and aligned


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], kernel: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.counts = counts
        ctx.kernel = kernel
        ctx.sums = [PLAIN.gradient_sum(weight) for weight in weights]
        if kernel:
            transposed = _together(weights).transpose(1, 2)
            made: Tensor = F.grouped_mm(x, transposed, offs=_ends(counts, x.device))
            return made
        y = x.new_empty(len(x), len(weights[0]))
        inputs = torch.split(x, counts)
        outputs = torch.split(y, counts)
        for rows, weight, out in zip(inputs, weights, outputs, strict=True):
            torch.mm(rows, weight.t(), out=out)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        _, _, _, *trained = ctx.needs_input_grad
        if ctx.kernel:
            ends = _ends(ctx.counts, x.device)
            dx = F.grouped_mm(grad, _together(weights), offs=ends)
            gradients = _by_kernel(grad, x, ends, ctx.sums) if any(trained) else trained
        else:
            dx = torch.empty_like(x)
            grads = torch.split(grad, ctx.counts)
            inputs = torch.split(x, ctx.counts)
            outputs = torch.split(dx, ctx.counts)
            for rows, weight, out in zip(grads, weights, outputs, strict=True):
                torch.mm(rows, weight, out=out)
            each = zip(grads, inputs, weights, ctx.sums, trained, strict=True)
            gradients = [
                PLAIN.weight_gradient(rows, own, weight, total) if wanted else None
                for rows, own, weight, total, wanted in each
            ]
        return dx, None, None, *_only(trained, gradients)


def _only(trained: Sequence[bool], gradients: Sequence[Any]) -> Iterator[Tensor | None]:
    """Yield the gradients of the weights that are trained, and None for the others."""
    for wanted, gradient in zip(trained, gradients, strict=True):
        yield gradient if wanted else None


def _by_kernel(
    grad: Tensor, x: Tensor, ends: Tensor, sums: Sequence[GradientSum | None]
) -> Sequence[Tensor]:
    """Return what autograd gets as the gradient of each expert's weight.

    The kernel's products are in bf16. If the sums lie at equal distances, one addition takes all of them.
    """
    made = F.grouped_mm(grad.t(), x, offs=ends)
    given = [total for total in sums if total is not None]
    if len(given) < len(sums):
        return made.unbind()
    places = [total.start() for total in given]
    totals = [total for total, _ in places]
    held = [holds for _, holds in places]
    whole = _as_one(totals)
    if whole is not None and len(set(held)) == 1:
        _add(whole, made, holds=held[0])
    else:
        for (total, holds), gradient in zip(places, made.unbind(), strict=True):
            _add(total, gradient, holds=holds)
    # Autograd gets the products too, but their parameters' hooks ignore them.
    return made.unbind()


def _add(total: Tensor, gradient: Tensor, *, holds: bool) -> None:
    """Add a gradient to a sum. holds: whether the sum has values."""
    if holds:
        total.add_(gradient)
    else:
        total.copy_(gradient)


def _together(weights: Sequence[Tensor]) -> Tensor:
    """Return [experts, out, in]: a view if the weights lie in a bucket at equal distances, as in a layer; else a copy."""
    whole = _as_one(weights)
    return torch.stack(list(weights)) if whole is None else whole


def _as_one(weights: Sequence[Tensor]) -> Tensor | None:
    """Return a view [experts, out, in] of weights that lie in one storage at equal distances, else None."""
    first = weights[0]
    size = first.numel()
    count = len(weights)
    starts = [weight.storage_offset() for weight in weights]
    step = starts[1] - starts[0] if count > 1 else size
    at_equal_distances = [starts[0] + number * step for number in range(count)]
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    in_one_storage = len(storages) == 1
    is_view = in_one_storage and starts == at_equal_distances and step >= size
    if not is_view:
        return None
    shape = count, *first.shape
    strides = step, *first.stride()
    return first.as_strided(shape, strides)


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return int32 [experts]: the index after each expert's last row."""
    pinned = device.type == "cuda"
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=pinned)
    return ends.to(device, non_blocking=True)


class _Permuted(torch.autograd.Function):
    """Permutes rows. The gradient is permuted back, which needs no addition."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, inverse = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return rows such that row i is x's row order[i]. inverse: the inverse permutation of order."""
    found: Tensor = _Permuted.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return found
