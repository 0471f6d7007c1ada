"""The norm of queries or keys over all heads of a projection (OLMo, MiniMax M2)."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_lite.parallel import comm
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import NormOptions, TensorGroup


class WideNorm(nn.Module):
    """RMSNorm over the elements of all heads. The heads and their weights are sharded over the tensor ranks."""

    kinds: ClassVar = {"weight": Kind.SHARDED}

    def __init__(self, width: int, options: NormOptions, ranks: TensorGroup) -> None:
        """width: elements of this rank's heads."""
        super().__init__()
        self.options, self.ranks = options, ranks
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """x [sequence, batch, heads of this rank, head_dim] -> the same shape."""
        wide = x.flatten(2).float()
        squares = self._over_all_heads(wide.square().sum(-1, keepdim=True))
        mean = squares / (wide.shape[-1] * self.ranks.size)
        weight = self.weight + 1 if self.options.zero_centered else self.weight
        normed = wide * torch.rsqrt(mean + self.options.epsilon) * weight
        return normed.to(x.dtype).view_as(x)

    def _over_all_heads(self, squares: Tensor) -> Tensor:
        """Sum over the tensor ranks. Each rank uses the sum for its own heads, so that the gradient is summed too."""
        if self.ranks.group is None:
            return squares
        summed = comm.sum_over(squares, self.ranks.group, scatter=False)
        return comm.shared_over(summed, self.ranks.group, gather=False)
