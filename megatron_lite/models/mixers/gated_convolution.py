"""The gated short convolution (LFM 2), one of the mixers of a layer.

    b, c, x = in_proj(norm(u))        out_proj(c * conv1d(b * x))

Source: Lfm2ShortConv of transformers 5.
"""

from torch import Tensor, nn

from megatron_lite.models.build_plan import Plan
from megatron_lite.models.mixers.convolution import Convolution
from megatron_lite.models.mixers.heads_over_context import (
    Heads,
    all_heads_of_own_tokens,
    own_heads,
    own_heads_of_all_tokens,
)
from megatron_lite.models.passes import Pass
from megatron_lite.models.state_space.short_convolution import short_convolution
from megatron_lite.parallel.tensor import NormColumnLinear, RowLinear


class GatedConvolution(nn.Module):
    """A gated short convolution with its norms."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        hidden, channels = plan.config.hidden, plan.sizes["conv_channels"]
        self.layer, self.channels = layer, channels
        self.in_proj = NormColumnLinear(
            hidden, 3 * channels, plan.norm, plan.ranks, bias=False, keep=plan.keep
        )
        self.conv1d = Convolution(channels, plan.config.convolution.width, bias=False)
        self.out_proj = RowLinear(
            channels, hidden, plan.ranks, bias=False, norm_after=plan.norm_after
        )

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        before_gate, after_gate, inner = self.in_proj(x).chunk(3, -1)
        convolved = self._convolved(before_gate * inner, run)
        projected: Tensor = self.out_proj(after_gate * convolved)
        return projected

    def _convolved(self, x: Tensor, run: Pass) -> Tensor:
        """Return the convolution of x [tokens, batch, channels], in x's dtype.

        Context-parallel ranks exchange all channels of some tokens for some channels of all tokens, and back.
        """
        channels = (Heads(self.channels),)
        x = own_heads_of_all_tokens(x, channels, run.context)
        weight = own_heads(self.conv1d.weight, channels, run.context)
        (before,) = run.states(self.layer, 1)
        y, last = short_convolution(x, weight, None, documents=run.documents, before=before)
        run.keep(self.layer, last)
        each_channel = y.to(x.dtype).unsqueeze(-1)
        return all_heads_of_own_tokens(each_channel, run.context).squeeze(-1)
