"""The short convolution of a mixer with a state, as a module."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_lite.models.state_space.kernels import convolution_by, convolution_kernel
from megatron_lite.models.state_space.short_convolution import last_inputs, short_convolution
from megatron_lite.parallel.parameter_kinds import Kind


class Convolution(nn.Module):
    """The weights of a causal convolution over each channel's last tokens. SiLU follows it."""

    kinds: ClassVar = {"weight": Kind.SHARDED, "bias": Kind.SHARDED}

    def __init__(self, channels: int, width: int, *, bias: bool) -> None:
        """channels: of this rank. width: in tokens, including the token itself."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def apply_to(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        documents: Tensor | None,
        before: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (x after convolution and SiLU, in x's dtype; the last inputs). The arguments: see short_convolution.

        weight, bias: of the channels of x.
        """
        width = weight.shape[-1]
        kernel = convolution_kernel(x, width, documents, before)
        if kernel is not None:
            made = convolution_by(kernel, x, weight, bias, documents=documents, before=before)
            return made, last_inputs(x, width, before)
        y, last = short_convolution(x, weight, bias, documents=documents, before=before)
        return nn.functional.silu(y).to(x.dtype), last
