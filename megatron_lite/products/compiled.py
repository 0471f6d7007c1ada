"""Sums of gradients for compiled code.

Like layers share their compiled code, so that it can't refer to the sum of one layer. It calls an operator with the weight
instead. When the operator runs, it finds the weight's sum by the address of the weight.
"""

from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megatron_lite.products.accumulating import GradientSum, without_content

_SUMS: WeakValueDictionary[int, GradientSum] = WeakValueDictionary()
"""Address of a weight -> the sum of its gradients. The weight keeps the sum alive."""
_MARK = "has_sum_for_compiled_code"


def offer_to_compiled_code(weight: Tensor, gradient_sum: GradientSum) -> None:
    """Let compiled code add to the sum. weight: keeps its address, and backward passes see it itself."""
    _SUMS[weight.data_ptr()] = gradient_sum
    setattr(weight, _MARK, True)


def is_offered(weight: Tensor) -> bool:
    """Return whether compiled code adds the weight's gradients to their sum. The code is traced at present."""
    return weight.requires_grad and getattr(weight, _MARK, False)


@torch.library.custom_op("megatron_lite::weight_gradient", mutates_args=())
def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Add grad' x to the sum of the weight's gradients, and return what autograd gets as the gradient.

    grad [rows, out], x [rows, in], weight [out, in].
    """
    found = _SUMS.get(weight.data_ptr())
    if found is None:
        return grad.t() @ x
    found.add(grad.t(), x)
    return without_content(weight)


@weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight)
