"""Norms of queries or keys with weights of each head's own (Command R+, StableLM 2 12B)."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import NormOptions


class OwnNorms(nn.Module):
    """A norm for each head, over the head's elements. The heads and their weights are sharded over the tensor ranks."""

    kinds: ClassVar = {"weight": Kind.SHARDED}

    def __init__(self, heads: int, head_dim: int, options: NormOptions) -> None:
        """heads: number of heads on this rank."""
        super().__init__()
        self.plain = options._replace(with_weight=False)
        self.weight = nn.Parameter(torch.empty(heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """x [sequence, batch, heads, head_dim] -> the same shape."""
        normed = self.plain.apply(x.float(), None, None)
        return (normed * self.weight).to(x.dtype)
