"""Attention of one layer, which a layer may have for its mixer: a norm, the matrices, norms of q and k, rotation."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_lite.models import rng
from megatron_lite.models.attention import attend
from megatron_lite.models.passes import Pass
from megatron_lite.models.plan import Plan
from megatron_lite.models.rotary import neighbours_apart, rotate
from megatron_lite.models.scores import of_layer
from megatron_lite.parallel.kinds import Kind
from megatron_lite.parallel.tensor import Norm, NormColumnLinear, RowLinear, TensorGroup
from megatron_lite.settings.options import ModelOptions


class Sinks(nn.Module):
    """A score of each head that takes weight and gives no value. Where Megatron keeps them: with what computes attention."""

    kinds: ClassVar = {"softmax_offset": Kind.SHARDED}

    def __init__(self, heads: int) -> None:
        """heads: of this rank."""
        super().__init__()
        self.softmax_offset = nn.Parameter(torch.empty(heads))


class SelfAttention(nn.Module):
    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        config, sizes = plan.config, plan.sizes
        self.layer, self.ranks, self.options, self.head_dim = layer, plan.ranks, plan.options, config.attention.head_dim
        self.at = rng.At(layer, rng.ATTENTION)
        self.kv_heads, self.group = sizes["kv_heads"], config.attention.heads // config.attention.kv_heads
        self.window, self.rotates = plan.kind(layer).window, plan.kind(layer).rotates
        self.rotates_locally = self.window is not None and config.positions.local_theta is not None
        self.interleaved, self.scale = config.positions.interleaved, config.attention.scale
        self.linear_qkv = NormColumnLinear(
            config.hidden, self.kv_heads * (self.group + 2) * self.head_dim, plan.norm, plan.ranks,
            bias=config.attention.qkv_bias, keep=plan.keep,
        )  # fmt: skip
        norm = (config.attention.head_dim, plan.norm_of_heads, Kind.OF_HEADS)
        self.q_layernorm = Norm(*norm) if config.attention.qk_norm else None
        self.k_layernorm = Norm(*norm) if config.attention.qk_norm else None
        self.core_attention = Sinks(sizes["heads"]) if config.attention.sinks else None
        self.linear_proj = RowLinear(
            sizes["heads"] * self.head_dim, config.hidden, plan.ranks, bias=config.attention.o_bias,
            norm_after=plan.norm_after,
        )  # fmt: skip

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        mixed = self.linear_qkv(x)
        mixed = mixed.unflatten(-1, (self.kv_heads, self.group + 2, self.head_dim))
        # One split, whose gradient is one concatenation; that of a slice is as large as the whole.
        q, k, v = (part.flatten(2, 3) for part in mixed.split((self.group, 1, 1), -2))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        rotary = run.local_rotary if self.rotates_locally else run.rotary
        if rotary is not None and self.rotates:
            if self.interleaved:  # q and k alike, so that their products stay what they are
                q, k = (neighbours_apart(x, rotary[0].shape[-1]) for x in (q, k))
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if run.cache is not None:
            k, v = run.cache.append(self.layer, k, v)
        sinks = None if self.core_attention is None else self.core_attention.softmax_offset
        mixed = attended(
            q, k, v, run, self.at, self.ranks, self.options, window=self.window, scale=self.scale, sinks=sinks
        )
        projected: Tensor = self.linear_proj(mixed.flatten(2))
        return projected


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: Pass,
    at: rng.At,
    ranks: TensorGroup,
    options: ModelOptions,
    *,
    window: int | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What attend gives, with dropout where there is any; the pass gets its largest scores where it asks for them."""
    how: Any = {"window": window, "backend": options.attention, "scale": scale, "sinks": sinks}
    drops = run.seed is not None and options.attention_dropout > 0
    if run.scores is None and not drops:
        return attend(q, k, v, run, **how)
    found: Tensor = _by_layer(q, k, v, run, at, ranks, options.attention_dropout if drops else 0.0, how)
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_layer(
    q: Tensor, k: Tensor, v: Tensor, run: Pass, at: rng.At, ranks: TensorGroup, dropout: float, how: dict[str, Any]
) -> Tensor:
    """Where the layer's number counts, for each of which there would be another compiled one."""
    largest = None if run.scores is None else of_layer(run.scores, at.layer, q)
    if not dropout:
        return attend(q, k, v, run, largest=largest, **how)
    assert run.seed is not None
    with run.seed.for_attention(at, ranks, q.device):
        return attend(q, k, v, run, dropout=dropout, largest=largest, **how)
