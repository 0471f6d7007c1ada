"""Attention and Mamba 2 side by side (Falcon-H1), one of the mixers of a layer. Their input is already normed.

    y = attention_out * attention(attention_in * u) + mamba_out * mamba(mamba_in * u)

The factors are numbers of the configuration. Source: modeling_falcon_h1.py of transformers 5.23.
"""

from dataclasses import replace

from torch import Tensor, nn

from megatron_lite.models.build_plan import Plan
from megatron_lite.models.mixers.mamba_mixer import MambaMixer
from megatron_lite.models.mixers.self_attention import SelfAttention
from megatron_lite.models.passes import Pass


class AttentionAndMamba(nn.Module):
    """The sum of attention and Mamba 2 on the same input, which is already normed."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        self.factors = plan.config.factors
        inner = _without_norms(plan)
        self.self_attention = SelfAttention(inner, layer)
        self.mixer = MambaMixer(inner, layer)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        factors = self.factors
        attended: Tensor = self.self_attention(x * factors.attention_in, run)
        remembered: Tensor = self.mixer(x * factors.mamba_in, run)
        return attended * factors.attention_out + remembered * factors.mamba_out


def _without_norms(plan: Plan) -> Plan:
    """Return the plan of both mixers: without norms of their own, and with the factor of keys in the scale of scores."""
    config = plan.config
    attention, norm = config.attention, replace(config.norm, shared=True)
    usual = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    scaled = replace(attention, scale=usual * config.factors.keys)
    # Sublayers that share a norm have matrices without norms.
    inner = replace(config, attention=scaled, norm=norm, parallel_residual=True)
    return replace(plan, config=inner)
