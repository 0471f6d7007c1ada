"""Products of activations with a matrix: forward, and the two of the backward pass. What computes them is chosen for each matrix.

Modules with a matrix have a `product`, which is PLAIN unless something else was put in its place (models/fp8.py). Nothing else knows.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

TURNED_ROUND = range(8, 16)
"""Rows of which MKL makes W x' faster than x W' in float32: up to 2.8 times as fast for 15 rows and a matrix of 4096 by 4096."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]; for autograd.

    Turned round in inference mode alone: training's bits don't follow from how many rows a layout gives a rank.
    """
    # What is compiled can't ask for the mode, and has no number of rows where it is compiled for any.
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled() or x.is_cuda or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    if rows not in TURNED_ROUND:
        return F.linear(x, weight, bias)
    made = torch.mm(weight, x.reshape(rows, -1).t()).t().contiguous().view(*x.shape[:-1], -1)
    return made if bias is None else made + bias


class Product:
    """In the dtype of the tensors."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], weight [out, in], bias [out] -> [..., out]; for autograd."""
        return linear(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same without autograd: what a Function calls that has a backward pass of its own."""
        return linear(x, weight, bias)

    def of_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad [..., out] -> the gradient of x [..., in]."""
        return grad @ weight

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """grad [rows, out], x [rows, in] -> [out, in]."""
        return grad.t() @ x


PLAIN = Product()


class OtherProduct(Product):
    """One whose three products autograd doesn't know."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made: Tensor = _Linear.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.has_bias = product, bias is not None
        return product.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        wanted, trained, biased, _ = ctx.needs_input_grad
        dx = ctx.product.of_input(grad, weight) if wanted else None
        dw = ctx.product.of_weight(rows, x.reshape(-1, x.shape[-1])) if trained else None
        return dx, dw, rows.sum(0) if ctx.has_bias and biased else None, None
