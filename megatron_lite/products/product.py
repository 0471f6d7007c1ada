"""Products of activations with a matrix: one in the forward pass, two in the backward pass.

A module with a matrix has the attribute `product`. It is PLAIN unless another implementation was set (products/selection.py).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.products import compiled
from megatron_lite.products.accumulating import GradientSum, gradient_sum_of, without_content
from megatron_lite.products.processor import has_tiles, lacks_bf16

TURNED_ROUND = range(8, 16)
"""Numbers of rows for which MKL computes W x' faster than x W' in float32.

W x' is up to 2.8 times as fast, for 15 rows and a matrix of 4096 by 4096.
"""

TURNED_ROUND_IN_TILES = range(2, 33)
"""Numbers of rows for which a processor with AMX computes W x' faster than x W' in bf16.

For 16 rows and a matrix of 5632 by 1024, W x' is 1.3 times as fast. One row is fastest as a vector, 1.4 times as fast as x W'.
Without AMX, both are slower than x W'.
"""

IN_FLOAT32 = 6
"""Fewest rows for which converting bf16 to float32 costs less than it gains, on a processor without bf16.

For 64 rows and a matrix of 2816 by 1024, the product takes 8 ms instead of 39 ms (Zen 3, one thread).
"""
_BLOCK = 1 << 19
"""Numbers of a matrix that exist in float32 at a time. They stay in the processor's cache."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]; differentiable.

    In inference mode, the operands may be swapped, a row may be a vector, and bf16 may be computed in float32. In training,
    none of this happens: the bits must not depend on the number of rows of a rank.
    """
    # Compiled code can't query inference mode, and has no fixed number of rows if shapes are dynamic.
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled() or x.is_cuda:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    multiply = _quickest(rows)
    if multiply is F.linear:
        return F.linear(x, weight, bias)
    return multiply(rows, weight, bias).view(*x.shape[:-1], len(weight))


def _quickest(rows: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the quickest way to multiply rows [rows, in] with a matrix on this CPU: rows, weight, bias -> [rows, out]."""
    count = len(rows)
    if rows.dtype == torch.float32:
        return _turned_round if count in TURNED_ROUND else F.linear
    if rows.dtype != torch.bfloat16:
        return F.linear
    if lacks_bf16(rows.device.type):
        return _in_float32 if count >= IN_FLOAT32 else F.linear
    if not has_tiles(rows.device.type):
        return F.linear
    if count == 1:
        return _as_vector
    return _turned_round if count in TURNED_ROUND_IN_TILES else F.linear


def _turned_round(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    columns = rows.t()
    if bias is None:
        return torch.mm(weight, columns).t().contiguous()
    return torch.addmm(bias.unsqueeze(1), weight, columns).t().contiguous()


def _as_vector(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    [row] = rows
    made = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
    return made.unsqueeze(0)


def _in_float32(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in bf16. It sums in float32, as torch does."""
    made = rows.new_empty(len(rows), len(weight))
    floats = rows.float()
    step = max(1, _BLOCK // weight.shape[1])
    for block, out in zip(torch.split(weight, step), torch.split(made, step, 1), strict=True):
        out.copy_(floats @ block.float().t())
    return made if bias is None else made + bias


class Product:
    """Products in the dtype of the tensors."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], weight [out, in], bias [out] -> [..., out]; differentiable."""
        if torch.is_grad_enabled() and self._adds(weight):
            made: Tensor = _Linear.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
            return made
        return linear(x, weight, bias)

    def _adds(self, weight: Tensor) -> bool:
        """Return whether the weight's gradient is added to its sum as a product."""
        if torch.compiler.is_compiling():
            return compiled.is_offered(weight)
        return self.gradient_sum(weight) is not None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same product without autograd, for a Function that has its own backward pass."""
        return linear(x, weight, bias)

    def of_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad [..., out] -> the gradient of x [..., in]."""
        return grad @ weight

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """grad [rows, out], x [rows, in] -> the gradient of the weight [out, in]."""
        return grad.t() @ x

    def row_squares(self, weight: Tensor) -> Tensor:
        """weight [out, in] -> the sum of the squares of each row, float32 [out]."""
        # With `dtype`, a GPU converts no whole matrix to float32.
        precise = torch.promote_types(weight.dtype, torch.float32)
        lengths: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=precise)
        return lengths.square()

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out] in the precision of the weight, whatever that of `linear`. Not differentiable."""
        return F.linear(x, weight)

    def gradient_sum(self, weight: Tensor) -> GradientSum | None:
        """Return the sum to which the weight's gradient is added as a product; None if of_weight makes it."""
        return gradient_sum_of(weight)

    def weight_gradient(
        self, grad: Tensor, x: Tensor, weight: Tensor, total: GradientSum | None
    ) -> Tensor:
        """Return what autograd gets as the weight's gradient. grad, x: as in of_weight, with any leading axes.

        total: what gradient_sum returned in the forward pass. Afterwards the weight may be another object.
        """
        rows = grad.reshape(-1, grad.shape[-1])
        inputs = x.reshape(-1, x.shape[-1])
        if torch.compiler.is_compiling():
            return self._compiled_gradient(rows, inputs, weight)
        if total is None:
            return self.of_weight(rows, inputs)
        total.add(rows.t(), inputs)
        return without_content(weight)

    def _compiled_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if not compiled.is_offered(weight):
            return self.of_weight(grad, x)
        made: Tensor = compiled.weight_gradient(grad, x, weight)
        return made


PLAIN = Product()


class OtherProduct(Product):
    """Products that autograd can't differentiate, so that this class calls all three."""

    def _compiled_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self.of_weight(grad, x)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made: Tensor = _Linear.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.has_bias = product, bias is not None
        ctx.gradient_sum = product.gradient_sum(weight)
        return product.forward(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wanted, trained, biased, _ = ctx.needs_input_grad
        product = ctx.product
        dx = product.of_input(grad, weight) if wanted else None
        dw = product.weight_gradient(grad, x, weight, ctx.gradient_sum) if trained else None
        db = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias and biased else None
        return dx, dw, db, None
