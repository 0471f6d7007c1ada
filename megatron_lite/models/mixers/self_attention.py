"""Self-attention, one of the mixers of a layer: a norm, the matrices, norms of q and k, rotation."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megaconv.model.subjects import Attention, Temperature
from megatron_lite.models import rng
from megatron_lite.models.alibi import own_slopes
from megatron_lite.models.attention import attend
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.input_matrix import input_matrix
from megatron_lite.models.mixers.own_norms import OwnNorms
from megatron_lite.models.mixers.wide_norm import WideNorm
from megatron_lite.models.passes import Pass
from megatron_lite.models.rotary import neighbours_apart, rotate
from megatron_lite.models.scored_attention import Rules
from megatron_lite.models.scores import of_layer
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import Norm, RowLinear, TensorGroup
from megatron_lite.settings.options import ModelOptions

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: F.softplus(x.float()).to(x.dtype),
}
"""The functions of attention's gate, by the words of megaconv.model.subjects.Attention."""


class Sinks(nn.Module):
    """A score for each head that takes weight but has no value. As in Megatron, it is a parameter of the core attention."""

    kinds: ClassVar = {"softmax_offset": Kind.SHARDED}

    def __init__(self, heads: int) -> None:
        """heads: number of heads on this rank."""
        super().__init__()
        self.softmax_offset = nn.Parameter(torch.empty(heads))


class SelfAttention(nn.Module):
    """Self-attention with its norm."""

    kinds: ClassVar = {"gate_bias": Kind.SHARDED}
    own_keys = True
    """False if keys and values are those of an earlier layer."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        attention, positions, kind = plan.config.attention, plan.config.positions, plan.kind(layer)
        self.layer = layer
        self.at = rng.At(layer, rng.ATTENTION)
        self.ranks = plan.ranks
        self.options = plan.options
        self.head_dim = attention.head_dim
        self.kv_heads = plan.sizes["kv_heads"]
        self.group = attention.heads // attention.kv_heads
        self.scale = attention.scale
        self.window = kind.window
        self.rotates = kind.rotates
        self.rotates_locally = kind.window is not None and positions.local_theta is not None
        self.interleaved = positions.interleaved
        self.chunk, self.cap = kind.chunk, attention.score_cap
        self.clip, self.norms_rotated = attention.clip, attention.qk_norm_rotated
        self.slopes = own_slopes(plan) if positions.kind == "alibi" else None
        self.l2_epsilon = (
            plan.config.norm.epsilon if attention.qk_l2_norm and kind.rotates else None
        )
        temperature = plan.config.temperature
        tempered = temperature.everywhere or not kind.rotates
        self.temperature = temperature if temperature.scale and tempered else None
        self._add_matrices(plan)

    def _add_matrices(self, plan: Plan) -> None:
        hidden, attention, heads = plan.config.hidden, plan.config.attention, plan.sizes["heads"]
        gated = attention.output_gate or attention.head_gate
        self.gate = GATES[attention.gate_activation] if gated else None
        has_bias = attention.output_gate and attention.gate_bias
        self.gate_bias = nn.Parameter(torch.empty(heads)) if has_bias else None
        self.keys_are_values = plan.kind(self.layer).keys_as_values
        self.widths = self._widths(attention)
        rows = self.kv_heads * sum(self.widths.values())
        normed = plan.config.norm.skips_first and self.layer == 0
        self.linear_qkv = input_matrix(plan, rows, bias=attention.qkv_bias, normed=normed)
        self.value_scale = attention.value_scale
        self.norm_of_values = plan.norm_of_values
        self.q_layernorm = self._norm(plan, heads) if attention.qk_norm else None
        norms_keys = attention.qk_norm and self.own_keys
        self.k_layernorm = self._norm(plan, self.kv_heads) if norms_keys else None
        has_sinks = plan.config.has("sinks_here", self.layer)
        self.core_attention = Sinks(heads) if has_sinks else None
        width = heads * attention.value_dim
        has_norm = plan.config.norm.inner
        self.inner_norm = WideNorm(width, plan.norm, plan.ranks) if has_norm else None
        self.linear_proj = RowLinear(
            width,
            hidden,
            plan.ranks,
            bias=plan.config.has("o_bias_here", self.layer),
            norm_after=plan.norm_after,
        )

    def _widths(self, attention: Attention) -> dict[str, int]:
        """Return the rows of linear_qkv for one key/value head, by part: q and its gate, k, and v if it isn't k."""
        widths = {"q": self.group * self.head_dim}
        if self.gate is not None:
            widths["gate"] = self.group * (1 if attention.head_gate else self.head_dim)
        if self.own_keys:
            widths["k"] = self.head_dim
        if self.own_keys and not self.keys_are_values:
            widths["v"] = attention.value_dim
        return widths

    def _norm(self, plan: Plan, heads: int) -> nn.Module:
        """Return the norm of queries or keys. heads: number of heads on this rank."""
        width = plan.config.attention.qk_norm_width
        if width == "all":
            return WideNorm(heads * self.head_dim, plan.norm_of_heads, plan.ranks)
        if width == "own":
            return OwnNorms(heads, self.head_dim, plan.norm_of_heads)
        return Norm(self.head_dim, plan.norm_of_heads, Kind.OF_HEADS)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        q, k, v, gate = self._projected(x)
        if self.norm_of_values is not None:
            v = self.norm_of_values.apply(v, None, None)
        if self.norms_rotated:
            q, k = self._normed(self._rotated(q, run), self._rotated(k, run))
        else:
            q, k = self._normed(q, k)
            q, k = self._rotated(q, run), self._rotated(k, run)
        if self.l2_epsilon is not None:
            q, k = _l2_normed(q, self.l2_epsilon), _l2_normed(k, self.l2_epsilon)
        if self.temperature is not None:
            q = tempered(q, self.temperature, run.positions)
        k, v = self._of_all_tokens(k, v, run)
        return self._attended(q, k, v, gate, run)

    def _of_all_tokens(self, k: Tensor, v: Tensor, run: Pass) -> tuple[Tensor, ...]:
        """Return the keys and values of this pass and, in generation, of all earlier tokens."""
        return (k, v) if run.cache is None else run.cache.append(self.layer, k, v)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, run: Pass) -> Tensor:
        """Return the projected attention. gate: of the output, of each head or of each element; or None."""
        mixed = self._mixed(q, k, v, run)
        if gate is not None and self.gate is not None:
            moved = gate if self.gate_bias is None else gate + self.gate_bias[:, None]
            mixed = mixed * self.gate(moved)
        mixed = mixed if self.inner_norm is None else self.inner_norm(mixed)
        projected: Tensor = self.linear_proj(mixed.flatten(2))
        return projected

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, run: Pass) -> Tensor:
        """Return the weighted sums of values [sequence, batch, heads, width of values]."""
        sinks = None if self.core_attention is None else self.core_attention.softmax_offset
        return attended(
            q,
            k,
            v,
            run,
            self.at,
            self.ranks,
            self.options,
            window=self.window,
            scale=self.scale,
            sinks=sinks,
            rules=self._rules(k, run),
        )

    def _rules(self, k: Tensor, run: Pass) -> Rules | None:
        """Return the rules of scores. A sequence within one chunk needs no rule of chunks."""
        ranks = 1 if run.context is None else run.context.size
        chunk = self.chunk if self.chunk is not None and len(k) * ranks > self.chunk else None
        may_be_joint = self.window is not None or not run.joint_in_windows
        joint = may_be_joint and run.joint is not None
        usual = self.cap is None and chunk is None and self.slopes is None and not joint
        return None if usual else Rules(self.cap, chunk, slopes=self.slopes, joint=joint)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k, v and the gate of the output, or None.

        Each is [sequence, batch, heads or kv_heads, head_dim]. v has the width of values, and the gate of a head may
        have one element.
        """
        parts = self._parts(x)
        q, k = self._heads_apart(parts["q"]), parts["k"]
        v = parts.get("v", k)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        if self.value_scale is not None:
            v = v * self.value_scale
        gate = parts.get("gate")
        return q, k, v, None if gate is None else self._heads_apart(gate)

    def _parts(self, x: Tensor) -> dict[str, Tensor]:
        """Return the projections [sequence, batch, kv_heads, rows of a group of heads] by name."""
        grouped = self.linear_qkv(x).unflatten(-1, (self.kv_heads, -1))
        # One split, because its gradient is a single concatenation. The gradient of each slice would be as large as the whole.
        split = grouped.split(list(self.widths.values()), -1)
        return dict(zip(self.widths, split, strict=True))

    def _heads_apart(self, x: Tensor) -> Tensor:
        """[sequence, batch, kv_heads, rows] -> [sequence, batch, heads, rows of a head]."""
        return x.view(*x.shape[:-1], self.group, -1).flatten(2, 3)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_layernorm is None or self.k_layernorm is None:
            return q, k
        return self.q_layernorm(q), self.k_layernorm(k)

    def _rotated(self, x: Tensor, run: Pass) -> Tensor:
        """Rotate q or k."""
        rotary = run.local_rotary if self.rotates_locally else run.rotary
        if rotary is None or not self.rotates:
            return x
        if self.interleaved:
            # The same order for q and k, so that their products don't change.
            x = neighbours_apart(x, rotary[0].shape[-1])
        return rotate(x, *rotary)


def _l2_normed(x: Tensor, epsilon: float) -> Tensor:
    """Divide each head of x by the root mean square of its elements."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return normed.to(x.dtype)


def tempered(q: Tensor, temperature: Temperature, positions: Tensor) -> Tensor:
    """Scale q [sequence, batch, heads, head_dim] by its positions, int64 [sequence, batch or 1]."""
    intervals = (positions.float() + temperature.offset) / temperature.interval
    if temperature.power:
        factor = torch.exp(temperature.scale * torch.log1p(intervals))
    else:
        factor = 1 + temperature.scale * torch.log1p(torch.floor(intervals))
    return (q * factor[..., None, None]).to(q.dtype)


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
    rules: Rules | None = None,
) -> Tensor:
    """Return attention with dropout if there is any. If the pass collects largest scores, they are stored there."""
    how: Any = {
        "window": window,
        "backend": options.attention,
        "scale": scale,
        "sinks": sinks,
        "rules": rules,
    }
    drops = run.seed is not None and options.attention_dropout > 0
    if run.scores is None and not drops:
        return attend(q, k, v, run, **how)
    found: Tensor = _by_layer(
        q, k, v, run, at, ranks, options.attention_dropout if drops else 0.0, how
    )
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    run: Pass,
    at: rng.At,
    ranks: TensorGroup,
    dropout: float,
    how: dict[str, Any],
) -> Tensor:
    """Attention that depends on the layer's number. It is not compiled, because each layer would be compiled anew."""
    largest = None if run.scores is None else of_layer(run.scores, at.layer, q)
    if not dropout:
        return attend(q, k, v, run, largest=largest, **how)
    assert run.seed is not None
    with run.seed.for_attention(at, ranks, q.device):
        return attend(q, k, v, run, dropout=dropout, largest=largest, **how)
