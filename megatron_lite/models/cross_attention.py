"""Attention of a decoder's tokens to the encoder's output. Its input is already normed."""

from torch import Tensor, nn

from megatron_lite.models import rng
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.mixers.self_attention import attended
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.tensor import ColumnLinear, RowLinear


class CrossAttention(nn.Module):
    """Attention of the decoder to the encoder's output."""

    def __init__(self, plan: Plan, layer: int) -> None:
        """layer: index in the decoder."""
        super().__init__()
        config, heads = plan.config, plan.sizes["heads"]
        self.ranks, self.options = plan.ranks, plan.options
        # Numbered after the encoder's layers, because both use the dropout seed of the source pass.
        self.at = rng.At(config.encoder.layers + layer, rng.ATTENTION)
        self.heads, self.head_dim = heads, config.attention.head_dim
        width, bias = heads * self.head_dim, config.attention.qkv_bias
        self.linear_q = ColumnLinear(config.hidden, width, plan.ranks, bias=bias)
        self.linear_kv = ColumnLinear(config.hidden, 2 * width, plan.ranks, bias=bias)
        self.linear_proj = RowLinear(width, config.hidden, plan.ranks, bias=config.attention.o_bias)

    def forward(self, x: Tensor, memory: Tensor, source: Pass) -> Tensor:
        """memory: the encoder's output for the pass `source`; [source sequence (/ tp), batch, hidden]."""
        q = self.linear_q(x).unflatten(-1, (self.heads, self.head_dim))
        k, v = self.linear_kv(memory).unflatten(-1, (self.heads, 2, self.head_dim)).unbind(-2)
        mixed = attended(q, k, v, source, self.at, self.ranks, self.options, window=None)
        projected: Tensor = self.linear_proj(mixed.flatten(2))
        return projected
