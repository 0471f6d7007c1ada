"""Products with a matrix in int8, on a CPU: one byte of memory for each weight is read.

    weights       w = q s: q int8 in -127..127, s float32, one for each row of the matrix
    activations   x = (h + l / 126) a / 63: h and l integers in -63..63, a the largest of the row's absolute values

A kernel multiplies h and l with q as two rows of one product, whose sums are exact in int32. x is therefore precise to
14 bits. With 8 bits, one large value in a row would cost the small ones their precision. Sums of the AVX2 instruction
overflow beyond 7 bits of one operand, and h and l have 7.

A row's result depends on the row alone, not on other rows of the product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.products.int8_kernels import kernel_of
from megatron_lite.products.product import Product

WEIGHT_STEPS, STEPS = 127, 63
"""Largest integers of weights, and of the two parts of activations."""
_FINER = 2 * STEPS
"""The second part of an activation counts so many times less than the first."""
_SMALLEST = 1e-30
"""Least divisor of a row, for rows of zeros."""
_ROWS = 512
"""Rows of a product that are computed at a time, which bounds the memory for both parts."""


@dataclass(frozen=True)
class Int8Matrix:
    """A matrix in int8 with a scale for each row."""

    values: Tensor
    """int8 [out, in]."""
    scales: Tensor
    """float32 [out]."""

    @property
    def nbytes(self) -> int:
        """Return the memory of the values and the scales."""
        return self.values.nbytes + self.scales.nbytes

    def plain(self) -> Tensor:
        """Return float32 [out, in]."""
        return self.values.float() * self.scales.unsqueeze(1)

    def row_squares(self) -> Tensor:
        """Return the sum of the squares of each row, float32 [out]."""
        parts = [part.float().square().sum(1) for part in torch.split(self.values, _ROWS)]
        return torch.cat(parts) * self.scales.square()


def quantize(matrix: Tensor) -> Int8Matrix:
    """Round each row of a matrix [out, in] to int8, with its largest absolute value as 127."""
    floats = matrix.float()
    largest = floats.abs().amax(1)
    # A row of zeros has any scale.
    scales = torch.where(largest == 0, 1.0, largest / WEIGHT_STEPS)
    values = (floats / scales.unsqueeze(1)).round_().to(torch.int8)
    return Int8Matrix(values, scales)


class Int8Product(Product):
    """Products with one matrix. It has no backward pass."""

    def __init__(self, matrix: Int8Matrix, squares: Tensor | None = None) -> None:
        """Copy the matrix into the kernel's order of memory. squares: its row_squares, for DoRA."""
        self.shape = tuple(matrix.values.shape)
        self.nbytes = matrix.nbytes
        self._squares = squares
        self._kernel = kernel_of(matrix.values, matrix.scales)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], bias [out] -> [..., out] in the dtype of x. weight: is not used, and may have no memory."""
        rows = x.reshape(-1, self.shape[1])
        if not len(rows):
            return x.new_empty(*x.shape[:-1], self.shape[0])
        parts = [self._product(part).to(x.dtype) for part in torch.split(rows, _ROWS)]
        made = parts[0] if len(parts) == 1 else torch.cat(parts)
        made = made.view(*x.shape[:-1], self.shape[0])
        return made if bias is None else made + bias

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear(x, weight, bias)

    def row_squares(self, weight: Tensor) -> Tensor:
        assert self._squares is not None, "load_quantized keeps them for DoRA"
        return self._squares

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.linear(x, weight)

    def _product(self, x: Tensor) -> Tensor:
        """x [rows, in] -> float32 [rows, out]. A row with NaN or infinity gives no finite numbers."""
        floats = x.float()
        largest = torch.linalg.vector_norm(floats, torch.inf, 1, keepdim=True)
        scale = largest.clamp_(min=_SMALLEST).div_(STEPS)
        scaled = floats / scale
        coarse = scaled.round()
        fine = scaled.sub_(coarse).mul_(_FINER)
        both = torch.cat((coarse, fine))
        # The kernel rounds the fine part to integers.
        found, rest = torch.split(self._kernel(both), len(x))
        return found.add_(rest, alpha=1 / _FINER).mul_(scale)
