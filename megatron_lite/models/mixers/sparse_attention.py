"""Sparse latent attention (DeepSeek V3.2): latent attention to the keys that an indexer chooses.

Megatron core's modules differ from latent attention's: the norms of latent vectors are modules, since the indexer needs
their output too, and the core attention contains the indexer.
"""

from torch import Tensor, nn

from megatron_lite.models.build_plan import Plan
from megatron_lite.models.mixers.indexer import Indexer
from megatron_lite.models.mixers.latent_attention import LatentAttention
from megatron_lite.models.mixers.self_attention import attended
from megatron_lite.models.passes import Pass
from megatron_lite.models.scored_attention import Rules
from megatron_lite.parallel.tensor import ColumnLinear, Norm


class SparseCore(nn.Module):
    """The core attention, as far as it has parameters."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        self.indexer = Indexer(plan, layer)


class SparseAttention(LatentAttention):
    """Latent attention with an indexer. Its input is already normed."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__(plan, layer)
        latent = plan.config.latent
        self.q_layernorm = Norm(latent.q_rank, plan.norm_of_latents)
        self.kv_layernorm = Norm(latent.kv_rank, plan.norm_of_latents)
        self.core_attention = SparseCore(plan, layer)

    @staticmethod
    def _up(plan: Plan, rank: int, out: int) -> nn.Module:
        return ColumnLinear(rank, out, plan.ranks)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        indexer = self.core_attention.indexer
        latent = self._latent_of_queries(x)
        assert self.linear_q_up_proj is not None, "an indexer needs the latent vector of queries"
        q = self._rotated_queries(self.linear_q_up_proj(latent), run)
        k, v = self._keys_and_values(x, run)
        index_keys = indexer.keys(x, run)
        if run.cache is not None:
            k, v, index_keys = run.cache.append(self.layer, k, v, index_keys)
        rules = Rules(chosen=indexer.choose(x, latent, index_keys, run))
        mixed = attended(
            q,
            k,
            v,
            run,
            self.at,
            self.ranks,
            self.options,
            window=None,
            scale=self.scale,
            rules=rules,
        )
        projected: Tensor = self.linear_proj(mixed.flatten(2))
        return projected

    def _latent_of_queries(self, x: Tensor) -> Tensor:
        """Return [sequence (/ tp), batch, q_rank], normed."""
        assert self.linear_q_down_proj is not None, "an indexer needs the latent vector of queries"
        normed: Tensor = self.q_layernorm(self.linear_q_down_proj(x))
        return normed

    def _normed_latent(self, latent: Tensor) -> Tensor:
        normed: Tensor = self.kv_layernorm(latent)
        return normed
