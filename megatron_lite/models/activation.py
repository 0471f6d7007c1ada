"""Activation functions of MLPs and experts."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaconv.model.subjects import MLP as Shape  # noqa: N811
from megatron_lite.parallel.tensor import Made

ACTIVATIONS: dict[str, Made] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""By the names of megaconv.model.subjects.MLP."""


def activate(
    x: Tensor, shape: Shape, weights: Tensor | None = None, limit: float | None = None
) -> Tensor:
    """[..., gate then up] or [..., ffn] -> [..., ffn].

    weights [..., 1], in x's dtype: a factor for each row; None: no factors.
    limit: upper limit of the activated gate, and limit of `up` in both directions; None: no limits.
    """
    differentiates = x.requires_grad and not torch.compiler.is_compiling()
    if shape.is_plain_swiglu and limit is None and differentiates:
        activated: Tensor = _SwiGLU.apply(x, weights)  # type: ignore[no-untyped-call]
        return activated
    made = _gated(x, shape, limit) if shape.gated else ACTIVATIONS[shape.activation](x)
    return made if weights is None else made * weights


def _gated(x: Tensor, shape: Shape, limit: float | None) -> Tensor:
    gate, up = x.chunk(2, -1)
    if shape.clamp is not None:
        gate, up = gate.clamp(max=shape.clamp), up.clamp(-shape.clamp, shape.clamp)
    activated = ACTIVATIONS[shape.activation](gate)
    if limit is not None:
        activated, up = activated.clamp(max=limit), up.clamp(-limit, limit)
    return activated * (up + shape.offset if shape.offset else up)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, times the weight of the row if there are weights. Only the input is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights)
        gate, up = x.chunk(2, -1)
        activated = F.silu(gate).mul_(up)
        return activated if weights is None else activated.mul_(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weights = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        silu = F.silu(gate)
        of_product = grad if weights is None else grad * weights
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)
        torch.mul(silu, of_product, out=dup)
        if weights is None:
            torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=dgate)
            return dx, None
        torch.ops.aten.silu_backward.grad_input(of_product.mul_(up), gate, grad_input=dgate)
        return dx, silu.mul_(up).mul_(grad).sum(-1, keepdim=True)
