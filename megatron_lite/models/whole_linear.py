"""A matrix that every tensor rank has whole."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import adapted
from megatron_lite.products.product import PLAIN, Product


class WholeLinear(nn.Module):
    """A replicated matrix, applied to this tensor rank's tokens."""

    kinds: ClassVar = {"weight": Kind.OF_TOKENS}

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.adapter: nn.Module | None = None
        self.product: Product = PLAIN
        self.weight = nn.Parameter(torch.empty(out, width))

    def forward(self, x: Tensor) -> Tensor:
        return adapted(self.product.linear(x, self.weight), self.adapter, x)
