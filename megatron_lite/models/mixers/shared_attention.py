"""Self-attention in models whose last layers attend with the keys and values of earlier layers (Gemma 4 E2B and E4B)."""

from torch import Tensor

from megaconv.planning.carried import sources
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.carried import KeysAndValues
from megatron_lite.models.mixers.differential_attention import DifferentialAttention
from megatron_lite.models.mixers.self_attention import SelfAttention
from megatron_lite.models.passes import Pass


class KeptAttention(SelfAttention):
    """Attention of a layer whose keys and values later layers use too."""

    def _of_all_tokens(self, k: Tensor, v: Tensor, run: Pass) -> tuple[Tensor, ...]:
        assert run.carried is not None
        run.carried.kept[self.window is not None] = KeysAndValues(k, v)
        return run.carried.of_all_tokens(self.window is not None, self.layer, run.cache)


class QueriesAlone(SelfAttention):
    """Attention of a layer without keys and values of its own."""

    own_keys = False

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        assert run.carried is not None
        q = self.linear_qkv(x).unflatten(-1, (-1, self.head_dim))
        q = self._rotated(q if self.q_layernorm is None else self.q_layernorm(q), run)
        k, v = run.carried.of_all_tokens(self.window is not None, self.layer, run.cache)
        return self._attended(q, k, v, None, run)


def attention(plan: Plan, layer: int) -> SelfAttention:
    """Return the attention of a layer."""
    if plan.config.attention.differential:
        return DifferentialAttention(plan, layer)
    if plan.kind(layer).shares_kv:
        return QueriesAlone(plan, layer)
    is_kept = layer in sources(plan.config).values()
    return KeptAttention(plan, layer) if is_kept else SelfAttention(plan, layer)
