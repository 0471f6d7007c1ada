"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), which a layer may have for its mixer.

    q = up(norm(down(x))), or directly            [nope | rope] in each head
    c, r = down(x);  k, v = up(norm(c))           k = [nope | r], where r is one for all heads

What goes down to the latent width is whole on every tensor rank, what goes up from it is sharded by heads. Keys and values are
made in full: the form that keeps the latent vectors in their place is for generation.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megatron_lite.models import rng
from megatron_lite.models.passes import Pass
from megatron_lite.models.plan import Plan
from megatron_lite.models.rotary import neighbours_apart, rotate, sharper
from megatron_lite.models.self_attention import attended
from megatron_lite.parallel import comm
from megatron_lite.parallel.kinds import Kind
from megatron_lite.parallel.product import PLAIN, Product
from megatron_lite.parallel.tensor import ColumnLinear, NormColumnLinear, RowLinear, adapted


class WholeLinear(nn.Module):
    """A matrix that every tensor rank has, applied to its own tokens."""

    kinds: ClassVar = {"weight": Kind.OF_TOKENS}

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.adapter: nn.Module | None = None
        self.product: Product = PLAIN
        self.weight = nn.Parameter(torch.empty(out, width))

    def forward(self, x: Tensor) -> Tensor:
        return adapted(self.product.linear(x, self.weight), self.adapter, x)


class LatentAttention(nn.Module):
    """Its input is normed already."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        config, latent, heads = plan.config, plan.config.latent, plan.sizes["heads"]
        self.layer, self.ranks, self.options, self.latent, self.heads = layer, plan.ranks, plan.options, latent, heads
        self.at = rng.At(layer, rng.ATTENTION)
        self.nope, self.window = config.attention.head_dim - latent.rope_dim, plan.kind(layer).window
        self.scale = scale_of_scores(config)
        width, direct = heads * config.attention.head_dim, not latent.q_rank
        self.linear_q_proj = ColumnLinear(config.hidden, width, plan.ranks) if direct else None
        self.linear_q_down_proj = None if direct else WholeLinear(config.hidden, latent.q_rank)
        self.linear_q_up_proj = None if direct else self._up(plan, latent.q_rank, width)
        self.linear_kv_down_proj = WholeLinear(config.hidden, latent.kv_rank + latent.rope_dim)
        self.linear_kv_up_proj = self._up(plan, latent.kv_rank, heads * (self.nope + latent.v_dim))
        self.linear_proj = RowLinear(heads * latent.v_dim, config.hidden, plan.ranks, bias=False)

    @staticmethod
    def _up(plan: Plan, rank: int, out: int) -> NormColumnLinear:
        return NormColumnLinear(rank, out, plan.norm_of_heads, plan.ranks, bias=False, keep=plan.keep)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden]."""
        rope, v_dim = self.latent.rope_dim, self.latent.v_dim
        q = self._queries(x)
        q = q.view(*q.shape[:2], self.heads, -1)
        latent, rotating = torch.split(self.linear_kv_down_proj(x), [self.latent.kv_rank, rope], -1)
        made: Tensor = self.linear_kv_up_proj(latent)
        k, v = torch.split(made.view(*made.shape[:2], self.heads, -1), [self.nope, v_dim], -1)
        rotating = comm.shared_over(rotating, self.ranks.group, gather=self.ranks.sequence).unsqueeze(2)
        if run.rotary is not None:
            q_nope, q_rope = torch.split(q, [self.nope, rope], -1)
            q = torch.cat((q_nope, rotate(neighbours_apart(q_rope, rope), *run.rotary)), -1)
            rotating = rotate(neighbours_apart(rotating, rope), *run.rotary)
        k = torch.cat((k, rotating.expand(*k.shape[:3], rope)), -1)
        if run.cache is not None:
            k, v = run.cache.append(self.layer, k, v)
        mixed = attended(q, k, v, run, self.at, self.ranks, self.options, window=self.window, scale=self.scale)
        projected: Tensor = self.linear_proj(mixed.flatten(2))
        return projected

    def _queries(self, x: Tensor) -> Tensor:
        if self.linear_q_proj is not None:
            direct: Tensor = self.linear_q_proj(x)
            return direct
        assert self.linear_q_down_proj is not None
        assert self.linear_q_up_proj is not None
        made: Tensor = self.linear_q_up_proj(self.linear_q_down_proj(x))
        return made


def scale_of_scores(config: ModelConfig) -> float:
    """What yarn does with mscale_all_dim comes on top of the usual scale."""
    scaling = config.positions.scaling or {}
    more = sharper(scaling["factor"], scaling["mscale_all_dim"]) if scaling.get("mscale_all_dim") else 1.0
    return more * more / math.sqrt(config.attention.head_dim)
