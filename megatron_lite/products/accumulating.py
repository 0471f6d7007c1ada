"""Products that are added to a float32 sum: gradients of weights in a 16-bit model.

On a GPU, cuBLAS multiplies 16-bit matrices and adds the products to a float32 matrix in one kernel. Elsewhere the product
is rounded to the dtype of its operands before it is added.
"""

from functools import cache

import torch
from torch import Tensor


@cache
def _has_wide_addmm() -> bool:
    """Return whether this torch has addmm with a wider result than its operands (torch 2.8 and newer)."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")


def adds_in_product(total: Tensor, x: Tensor) -> bool:
    """Return whether add_product is a single kernel that does not round the product."""
    if total.dtype == x.dtype:
        return True
    half_precision = x.dtype in (torch.float16, torch.bfloat16)
    return x.is_cuda and half_precision and total.dtype == torch.float32 and _has_wide_addmm()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total, in place. total [n, m], left [n, k], right [k, m]; total may be float32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif adds_in_product(total, left):
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total += left @ right
