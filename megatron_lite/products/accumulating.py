"""Products that are added to a sum: gradients of weights in a 16-bit model. The sum is float32, or bf16 as the weights.

On a GPU, cuBLAS multiplies 16-bit matrices and adds the products to a float32 matrix in one kernel: through torch, or
through apex if torch is older than 2.8. Elsewhere the product is rounded to the dtype of its operands before it is added.

apex: csrc/megatron/fused_weight_gradient_dense.cpp. Its function is compiled, so it has no signature.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

APEX = "fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"
"""The module and the function of apex: it adds d_output' input to d_weight, in place.

Arguments: input [rows, in], d_output [rows, out], both contiguous and of 16 bits; d_weight float32 [out, in].
"""
HALF = torch.float16, torch.bfloat16


@cache
def _has_wide_addmm() -> bool:
    """Return whether this torch has addmm with a wider result than its operands (torch 2.8 and newer)."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")


@cache
def apex_kernel() -> Callable[..., Any] | None:
    """Return apex's function, or None if apex is not installed with it."""
    module, function = APEX
    try:
        found: Callable[..., Any] | None = getattr(import_module(module), function, None)
    except (ImportError, OSError):
        # OSError: a library of the package that can't be loaded.
        return None
    return found


def adds_in_product(total: Tensor, x: Tensor) -> bool:
    """Return whether add_product is a single kernel that does not round the product."""
    if total.dtype == x.dtype:
        return True
    return _is_wide(total, x) and _has_wide_addmm()


def _is_wide(total: Tensor, x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF and total.dtype == torch.float32


def add_product(total: Tensor, left: Tensor, right: Tensor, *, replaces: bool = False) -> None:
    """Add left @ right to total, in place. total [n, m], left [n, k], right [k, m]; total may be float32.

    replaces: whether the product replaces total, whose values are undefined.
    """
    if total.dtype == left.dtype:
        _add_in_dtype(total, left, right, replaces=replaces)
    elif adds_in_product(total, left):
        _add_wide(total, left, right, replaces=replaces)
    elif _is_wide(total, left) and apex_kernel() is not None:
        _add_by_apex(total, left, right, replaces=replaces)
    elif replaces:
        total.copy_(left @ right)
    else:
        total += left @ right


def _add_in_dtype(total: Tensor, left: Tensor, right: Tensor, *, replaces: bool) -> None:
    if replaces:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


def _add_wide(total: Tensor, left: Tensor, right: Tensor, *, replaces: bool) -> None:
    if replaces:
        torch.ops.aten.mm.dtype_out(left, right, total.dtype, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


def _add_by_apex(total: Tensor, left: Tensor, right: Tensor, *, replaces: bool) -> None:
    add = apex_kernel()
    assert add is not None
    if replaces:
        total.zero_()
    add(right.contiguous(), left.t().contiguous(), total)


class GradientSum:
    """The sum of a parameter's gradients in its bucket, to which products are added directly.

    Autograd then gets memory without content as the gradient, so that the parameter's hook is called as usual.
    """

    def __init__(self, place: Callable[[], tuple[Tensor, bool]], *, lasting: bool) -> None:
        """place: returns (the sum in the parameter's shape, whether it holds gradients of this step).

        From the call on, the sum counts as holding gradients of this step.
        lasting: whether the sum's memory stays the same, and backward passes see the parameter itself. Other libraries
        need both.
        """
        self._place = place
        self.lasting = lasting
        self._added = False

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right, of the parameter's shape."""
        total, holds = self._place()
        add_product(total, left, right, replaces=not holds)
        self._added = True

    def start(self) -> tuple[Tensor, bool]:
        """Return (the sum, whether it holds gradients of this step). The caller has to add to it, or to replace it."""
        self._added = True
        return self._place()

    def give_to_library(self, weight: Any) -> None:
        """Give the sum to a library that adds to `main_grad`, as Megatron's parameters have it."""
        total, holds = self._place()
        if not holds:
            total.zero_()
        weight.main_grad = total
        weight.grad_added_to_main_grad = False

    def take_added(self, weight: Any) -> bool:
        """Return whether a product was added since the last call: autograd's gradient has no content then."""
        added = self._added or getattr(weight, "grad_added_to_main_grad", False)
        self._added = False
        if added:
            weight.grad_added_to_main_grad = False
        return added


def gradient_sum_of(weight: Tensor) -> GradientSum | None:
    """Return the sum for the weight's gradients, or None if autograd brings them to the bucket."""
    if torch.compiler.is_compiling() or not weight.requires_grad:
        return None
    found: GradientSum | None = getattr(weight, "gradient_sum", None)
    return found


def set_gradient_sum(weight: Any, gradient_sum: GradientSum) -> None:
    """Let the weight's gradients be added to the sum directly."""
    weight.gradient_sum = gradient_sum


def without_content(weight: Tensor) -> Tensor:
    """Return the gradient that autograd gets if the product was added to the sum."""
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
