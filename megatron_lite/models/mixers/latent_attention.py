"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), one of the mixers of a layer.

    q = up(norm(down(x))), or directly            [nope | rope] in each head
    c, r = down(x);  k, v = up(norm(c))           k = [nope | r], where r is shared by all heads

Matrices that project down to the latent width are replicated on every tensor rank; matrices that project up are sharded
by heads. Keys and values are computed in full. The form that works on the latent vectors directly is for generation.
"""

import math

import torch
from torch import Tensor, nn

from megaconv.model.config import ModelConfig
from megatron_lite.models import rng
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.mixers.self_attention import attended, tempered
from megatron_lite.models.passes import Pass
from megatron_lite.models.rotary import neighbours_apart, rotate, sharper
from megatron_lite.models.whole_linear import WholeLinear
from megatron_lite.parallel import comm
from megatron_lite.parallel.tensor import ColumnLinear, NormColumnLinear, RowLinear


class LatentAttention(nn.Module):
    """Latent attention. Its input is already normed."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        config, latent = plan.config, plan.config.latent
        self.layer = layer
        self.at = rng.At(layer, rng.ATTENTION)
        self.ranks = plan.ranks
        self.options = plan.options
        self.latent = latent
        self.heads = plan.sizes["heads"]
        self.nope = config.attention.head_dim - latent.rope_dim
        self.window = plan.kind(layer).window
        self.scale = scale_of_scores(config)
        self.temperature = config.temperature if config.temperature.scale else None
        self._add_queries(plan)
        self.linear_kv_down_proj = WholeLinear(config.hidden, latent.kv_rank + latent.rope_dim)
        self.linear_kv_up_proj = self._up(
            plan, latent.kv_rank, self.heads * (self.nope + latent.v_dim)
        )
        self.linear_proj = RowLinear(
            self.heads * latent.v_dim, config.hidden, plan.ranks, bias=False
        )

    def _add_queries(self, plan: Plan) -> None:
        """Add one matrix, or two with the latent vector of queries between them."""
        hidden, q_rank = plan.config.hidden, plan.config.latent.q_rank
        width = self.heads * plan.config.attention.head_dim
        direct = not q_rank
        self.linear_q_proj = ColumnLinear(hidden, width, plan.ranks) if direct else None
        self.linear_q_down_proj = None if direct else WholeLinear(hidden, q_rank)
        self.linear_q_up_proj = None if direct else self._up(plan, q_rank, width)

    @staticmethod
    def _up(plan: Plan, rank: int, out: int) -> nn.Module:
        """Return the norm of a latent vector and the matrix that projects it up."""
        return NormColumnLinear(
            rank, out, plan.norm_of_latents, plan.ranks, bias=False, keep=plan.keep
        )

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        q = self._queries(x, run)
        if self.temperature is not None:
            q = tempered(q, self.temperature, run.positions)
        k, v = self._keys_and_values(x, run)
        if run.cache is not None:
            k, v = run.cache.append(self.layer, k, v)
        mixed = attended(
            q, k, v, run, self.at, self.ranks, self.options, window=self.window, scale=self.scale
        )
        projected: Tensor = self.linear_proj(mixed.flatten(2))
        return projected

    def _queries(self, x: Tensor, run: Pass) -> Tensor:
        return self._rotated_queries(self._projected_queries(x), run)

    def _rotated_queries(self, projected: Tensor, run: Pass) -> Tensor:
        """Return [sequence, batch, heads, head_dim]: the part without rotation, then the rotated part."""
        q = self._by_head(projected)
        if run.rotary is None:
            return q
        q_nope, q_rope = torch.split(q, [self.nope, self.latent.rope_dim], -1)
        return torch.cat((q_nope, self._rotated(q_rope, run)), -1)

    def _keys_and_values(self, x: Tensor, run: Pass) -> tuple[Tensor, Tensor]:
        """Return keys and values of this rank's heads. All heads share the rotated part of the keys."""
        sizes = self.latent
        ranks = self.ranks
        rope = sizes.rope_dim
        down: Tensor = self.linear_kv_down_proj(x)
        latent, shared = torch.split(down, [sizes.kv_rank, rope], -1)
        up: Tensor = self.linear_kv_up_proj(self._normed_latent(latent))
        k, v = torch.split(self._by_head(up), [self.nope, sizes.v_dim], -1)
        shared = comm.shared_over(shared, ranks.group, gather=ranks.sequence)
        rotated = self._rotated(shared.unsqueeze(2), run)
        of_each_head = rotated.expand(*k.shape[:3], rope)
        keys = torch.cat((k, of_each_head), -1)
        return keys, v

    def _normed_latent(self, latent: Tensor) -> Tensor:
        """Return the input of linear_kv_up_proj, which contains the norm."""
        return latent

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1)

    def _rotated(self, x: Tensor, run: Pass) -> Tensor:
        if run.rotary is None:
            return x
        halves = x if self.latent.halves else neighbours_apart(x, self.latent.rope_dim)
        return rotate(halves, *run.rotary)

    def _projected_queries(self, x: Tensor) -> Tensor:
        if self.linear_q_proj is not None:
            direct: Tensor = self.linear_q_proj(x)
            return direct
        assert self.linear_q_down_proj is not None
        assert self.linear_q_up_proj is not None
        made: Tensor = self.linear_q_up_proj(self.linear_q_down_proj(x))
        return made


def scale_of_scores(config: ModelConfig) -> float:
    """Return the scale of scores: the usual one, times yarn's factor for mscale_all_dim if it is set."""
    scaling = config.positions.scaling or {}
    more = (
        sharper(scaling["factor"], scaling["mscale_all_dim"])
        if scaling.get("mscale_all_dim")
        else 1.0
    )
    return more * more / math.sqrt(config.attention.head_dim)
