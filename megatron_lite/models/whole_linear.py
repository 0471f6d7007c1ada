"""A matrix that every tensor rank has whole."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import Matrix


class WholeLinear(Matrix):
    """A replicated matrix, applied to this tensor rank's tokens."""

    kinds: ClassVar = {"weight": Kind.OF_TOKENS}

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(self.product.linear(x, self.weight), x)
