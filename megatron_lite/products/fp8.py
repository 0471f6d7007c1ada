"""Matrix products in FP8 with Megatron's recipes. Weights keep their dtype; each product quantizes its operands.

| recipe     | one scale for                                       | computed by                                  |
|------------|-----------------------------------------------------|----------------------------------------------|
| tensorwise | a tensor: its largest element now                   | torch._scaled_mm                             |
| delayed    | a tensor: its largest element in the steps before   | torch._scaled_mm                             |
| blockwise  | 128 elements in a row, of a weight 128 x 128        | dequantized copies: torch has no kernel here |
| mxfp8      | 32 elements in a row                                | the same                                     |

Forward operands are e4m3. Gradients are e5m2 if the format is `hybrid`, else e4m3. Scales of blocks are powers of two.

Sources: Transformer Engine's recipes (Float8CurrentScaling, DelayedScaling, Float8BlockScaling, MXFP8BlockScaling) and
OCP's MX formats.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.products.accumulating import GradientSum
from megatron_lite.products.product import OtherProduct
from megatron_lite.settings.options import FP8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = {"tensorwise": 16, "delayed": 16, "blockwise": 16, "mxfp8": 32}
"""The sides of a matrix have to be multiples of these, because GPU kernels require it."""
ROLES = ("input", "weight", "gradient")
_LARGEST_FACTOR = 2.0**127
"""The largest power of two in float32."""


class Operand(NamedTuple):
    """One operand of a product."""

    role: str
    values: Tensor
    """[rows, summed axis]."""
    dtype: torch.dtype


class FP8Product(OtherProduct):
    """The products of one matrix, with a scale for each tensor from its current values."""

    def __init__(self, options: FP8) -> None:
        self.options = options
        self._of_gradients = E5M2 if options.format == "hybrid" else E4M3

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Product.forward."""
        rows = x.reshape(-1, x.shape[-1])
        made = self._multiply(
            Operand("input", rows, E4M3), Operand("weight", weight, E4M3), x.dtype
        )
        made = made.view(*x.shape[:-1], len(weight))
        return made if bias is None else made + bias

    def of_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """See Product.of_input."""
        rows = Operand("gradient", grad.reshape(-1, grad.shape[-1]), self._of_gradients)
        made = self._multiply(rows, Operand("weight", weight.t(), E4M3), grad.dtype)
        return made.view(*grad.shape[:-1], weight.shape[1])

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """See Product.of_weight. The product is not in FP8 if the options exclude weight gradients."""
        if not self.options.weight_gradient:
            return super().of_weight(grad, x)
        left = Operand("gradient", grad.t(), self._of_gradients)
        return self._multiply(left, Operand("input", x.t(), E4M3), grad.dtype)

    def gradient_sum(self, weight: Tensor) -> GradientSum | None:
        """See Product.gradient_sum. A product in FP8 is added by autograd."""
        return None if self.options.weight_gradient else super().gradient_sum(weight)

    def _multiply(self, left: Operand, right: Operand, dtype: torch.dtype) -> Tensor:
        """left [m, k], right [n, k] -> left right' [m, n]."""
        if not left.values.numel():
            return left.values.new_zeros(len(left.values), len(right.values))
        sides = []
        for role, values, kind in (left, right):
            factor = self.scale(role, values, kind)
            # A weight's gradient sums over tokens, whose number may not be a multiple of 16.
            padded = F.pad(values, (0, -values.shape[1] % 16))
            sides.append((quantized(padded, factor, kind).contiguous(), factor.reciprocal()))
        (a, of_a), (b, of_b) = sides
        return torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=dtype)

    def scale(self, role: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return float32 []: the factor for the values before rounding."""
        return factor(values.abs().amax().float(), dtype, self.options.margin)


class DelayedProduct(FP8Product):
    """Products with scales from the largest elements of earlier steps. Without history, the current values give the scale."""

    def __init__(self, options: FP8) -> None:
        super().__init__(options)
        self.history: dict[str, Tensor] = {}
        """float32 [steps] by role, the latest step first."""
        self.largest: dict[str, Tensor] = {}
        """float32 [] by role: the largest element in this step."""

    def scale(self, role: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        found = values.abs().amax().float()
        self.largest[role] = (
            torch.maximum(self.largest[role], found) if role in self.largest else found
        )
        before = self.history.get(role)
        if before is not None:
            earlier = before.amax() if self.options.algorithm == "max" else before[0]
            # An expert without tokens had no values: a scale of 1 would round its next gradients to 0. A skipped step may
            # have had infinite ones.
            found = torch.where((earlier > 0) & earlier.isfinite(), earlier, found)
        return factor(found, dtype, self.options.margin)

    def begin_step(self) -> None:
        """Start a new step: the elements of an evaluation before it take no part in the histories."""
        self.largest.clear()

    def end_step(self, largest: Tensor) -> None:
        """Add a step to the histories. largest: float32 [roles] over all ranks; 0 for a role without values."""
        for role, found in zip(ROLES, largest, strict=True):
            before = self.history.get(role, found.new_zeros(0))
            self.history[role] = torch.cat((found.view(1), before))[: self.options.history]
        self.largest.clear()

    def state(self) -> Tensor:
        """Return the histories, float32 [roles, steps]. They exist after the first step."""
        return torch.stack([self.history[role] for role in ROLES])

    def load_state(self, state: Tensor) -> None:
        """Restore the histories from state(), which may have more or fewer steps than the options request."""
        self.history = dict(zip(ROLES, state[:, : self.options.history].clone(), strict=True))


class BlockProduct(FP8Product):
    """Products with a scale for each block along the summed axis, by dequantized copies.

    The class shows the numerical effect of a recipe; it is not fast.
    """

    def _multiply(self, left: Operand, right: Operand, dtype: torch.dtype) -> Tensor:
        # bf16 is exact: an element has at most 4 significant bits, and the scale is a power of two.
        a, b = (in_blocks(values, kind, self._block(role)) for role, values, kind in (left, right))
        return (a @ b.t()).to(dtype)

    def _block(self, role: str) -> tuple[int, int]:
        if self.options.recipe == "mxfp8":
            return 1, 32
        return (128, 128) if role == "weight" else (1, 128)


KINDS = {
    "tensorwise": FP8Product,
    "delayed": DelayedProduct,
    "blockwise": BlockProduct,
    "mxfp8": BlockProduct,
}


def factor(largest: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Return float32 []: the factor that scales `largest` to the largest number of the format; 1 for zeros."""
    found = torch.finfo(dtype).max / largest / 2**margin
    # For the smallest numbers it would be infinite, and infinity times a zero beside them is not a number.
    found = found.clamp(max=_LARGEST_FACTOR)
    return torch.where(largest > 0, found, torch.ones_like(found))


def quantized(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to FP8. Values beyond the format's range are clamped to it."""
    most = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-most, most).to(dtype)


def in_blocks(values: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Tensor:
    """Quantize and dequantize in the dtype of `values`, with a power of two for each block [rows, columns].

    No element overflows.
    """
    rows, columns = values.shape
    high, wide = block
    padded = F.pad(values.float(), (0, -columns % wide, 0, -rows % high))
    tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    largest = tiles.abs().amax((1, 3), keepdim=True)
    # Round down to a power of two, so that the largest element does not overflow.
    scale = torch.exp2(torch.floor(torch.log2(factor(largest, dtype))))
    found = quantized(tiles, scale, dtype).float() / scale
    return found.view_as(padded)[:rows, :columns].to(values.dtype)


def end_step(
    products: Sequence[DelayedProduct], device: torch.device, combine: Callable[[Tensor], None]
) -> None:
    """End a step. combine: raises each element to the largest one of all ranks with parts of the same tensors."""
    if not products:
        return
    none = torch.zeros((), device=device)
    found = torch.stack([product.largest.get(role, none) for product in products for role in ROLES])
    combine(found)
    for product, own in zip(products, found.view(-1, len(ROLES)), strict=True):
        product.end_step(own)
