"""xIELU (arXiv 2411.13010), the activation of Apertus: a polynomial above 0 and an exponential below, with trained numbers.

    x > 0     p x² + beta x                                      p = softplus(alpha_p)
    else      n (expm1(min(x, eps)) - x) + beta x                n = beta + softplus(alpha_n)

Each layer has its own numbers. alpha_p and alpha_n are trained; beta and eps keep their values, as in transformers.
Source: XIELUActivation in activations.py of transformers 5.23.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models.recompute import recomputed
from megatron_lite.parallel.parameter_kinds import Kind


class XIELU(nn.Module):
    """The activation of one layer. Every tensor-parallel rank has its numbers, and applies them to its columns."""

    kinds: ClassVar = {
        "alpha_p": Kind.OF_HEADS, "alpha_n": Kind.OF_HEADS, "beta": Kind.UNTRAINED, "eps": Kind.UNTRAINED,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))
        self.beta = nn.Parameter(torch.empty(()), requires_grad=False)
        self.eps = nn.Parameter(torch.empty(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return xIELU of each element, in x's dtype."""
        activated: Tensor = recomputed(xielu, x, self.alpha_p, self.alpha_n, self.beta, self.eps)
        return activated


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Return xIELU of each element of x, computed in float32 or wider. The other tensors have one element each."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, beta = x.to(dtype), beta.to(dtype)
    positive = F.softplus(alpha_p.to(dtype))
    negative = beta + F.softplus(alpha_n.to(dtype))
    above = positive * wide.square()
    # The minimum keeps the branch that torch.where drops finite, so that its gradient is 0 and not NaN.
    below = negative * (torch.expm1(torch.minimum(wide, eps.to(dtype))) - wide)
    return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)
