"""The gated delta net (arXiv 2412.06464), one of the mixers of a layer.

    q, k, v, z, b, a = in_proj(norm(u))      q, k, v = silu(conv1d(q, k, v))      q, k are divided by their lengths
    y = gated_delta_rule(q, k, v, -exp(A_log) softplus(a + dt_bias), sigmoid(b))
    out_proj(norm(y) * silu(z))              the norm is over the channels of each head

Source: modeling_qwen3_next.py of transformers 5; gated_delta_net.py of megatron-core 0.16.1.
"""

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models.build_plan import Plan
from megatron_lite.models.mixers.convolution import Convolution
from megatron_lite.models.mixers.heads_over_context import (
    Heads,
    own_heads,
    own_heads_of_all_tokens,
)
from megatron_lite.models.mixers.state_parameters import DELTA_NET_IN_FLOAT32
from megatron_lite.models.passes import Packed, Pass
from megatron_lite.models.recompute import recomputed
from megatron_lite.models.state_space.gated_delta import gated_delta_rule, gated_delta_step
from megatron_lite.models.state_space.kernels import delta_kernel
from megatron_lite.parallel.context import tokens_for_heads
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import Made, NormColumnLinear, RowLinear
from megatron_lite.products.wide import wide

EPSILON_OF_LENGTHS = 1e-6
"""Is added to the squared lengths of q and k."""


class HeadNorm(nn.Module):
    """RMSNorm over the channels of each head, before the gate."""

    kinds: ClassVar = {"weight": Kind.OF_HEADS}

    def __init__(
        self, width: int, epsilon: float, *, zero_centered: bool, gate: Made = F.silu
    ) -> None:
        """zero_centered: whether the norm multiplies with its weight + 1, as Transformer Engine's does.

        gate: the function of the gate.
        """
        super().__init__()
        self.epsilon, self.zero_centered = epsilon, zero_centered
        self.gate = gate
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """y, gate [tokens, batch, heads, width] -> the same shape, in y's dtype."""
        weight = wide(self.weight) + 1 if self.zero_centered else wide(self.weight)
        normed = F.rms_norm(wide(y), y.shape[-1:], weight, self.epsilon)
        return (normed * self.gate(wide(gate))).to(y.dtype)


class GatedDeltaNet(nn.Module):
    """A gated delta net with the norm before it."""

    kinds: ClassVar = {"A_log": Kind.SHARDED, "dt_bias": Kind.SHARDED}
    in_float32: ClassVar = DELTA_NET_IN_FLOAT32

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        config, linear = plan.config, plan.config.linear
        key_heads, heads = plan.sizes["linear_key_heads"], plan.sizes["linear_value_heads"]
        self.layer, self.heads = layer, heads
        self.key_dim, self.value_dim = linear.key_dim, linear.value_dim
        keys, values = key_heads * linear.key_dim, heads * linear.value_dim
        self.parts = (
            Heads(key_heads, linear.key_dim),
            Heads(key_heads, linear.key_dim),
            Heads(heads, linear.value_dim),
        )
        self.widths = [2 * keys + values, values, heads, heads]
        self.in_proj = NormColumnLinear(
            config.hidden, sum(self.widths), plan.norm, plan.ranks, bias=False, keep=plan.keep
        )
        self.conv1d = Convolution(2 * keys + values, linear.conv, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        zero_centered = plan.norm.zero_centered and not plan.options.local_layers
        epsilon = plan.norm.epsilon if linear.out_epsilon is None else linear.out_epsilon
        self.out_norm = HeadNorm(linear.value_dim, epsilon, zero_centered=zero_centered)
        self.most_written = 2.0 if linear.double_writes else 1.0
        self.out_proj = RowLinear(values, config.hidden, plan.ranks, bias=False)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        # [tokens, batch, channels of q, k and v], [.., channels of v], [.., heads], [.., heads]
        inner, gate, write, forget = self.in_proj(x).split(self.widths, -1)
        weight: Tensor = self.conv1d.weight
        dt_bias: Tensor = self.dt_bias
        a_log: Tensor = self.A_log
        context = run.context
        if context is not None:
            # Ranks exchange all heads of some tokens for some heads of all tokens.
            each_head = (Heads(self.heads),)
            inner = own_heads_of_all_tokens(inner, self.parts, context)
            write = own_heads_of_all_tokens(write, each_head, context)
            forget = own_heads_of_all_tokens(forget, each_head, context)
            weight = own_heads(weight, self.parts, context)
            dt_bias = own_heads(dt_bias, each_head, context)
            a_log = own_heads(a_log, each_head, context)
        documents = None if run.packed is None else run.packed.numbers
        before, state = (None, None) if run.cache is None else run.cache.states(self.layer)
        inner, before = self.conv1d.apply_to(inner, weight, None, documents, before)
        time_steps = F.softplus(wide(forget) + wide(dt_bias))
        decay = -wide(a_log).exp() * time_steps
        beta = wide(write).sigmoid() * self.most_written
        y, state = self._scan(inner, decay, beta, run.packed, state)
        if run.cache is not None:
            run.cache.keep(self.layer, before, state)
        y = y if context is None else tokens_for_heads(y, context)
        normed = self.out_norm(y, gate.unflatten(-1, (self.heads, -1)))
        projected: Tensor = self.out_proj(normed.flatten(2))
        return projected

    def _scan(
        self,
        inner: Tensor,
        decay: Tensor,
        beta: Tensor,
        packed: Packed | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (y [tokens, batch, heads, width], the last state). inner: q, k and v [tokens, batch, channels]."""
        q, k, v = self._by_head(inner, decay.shape[-1])
        if state is not None and len(v) == 1:
            y, state = gated_delta_step(q[0], k[0], v[0], decay[0], beta[0], state)
            return y.unsqueeze(0), state
        by_row = [each.transpose(0, 1) for each in (q, k, v, decay, beta)]
        documents = None if packed is None else packed.numbers
        ends = None if packed is None else packed.ends
        rule = partial(gated_delta_rule, documents=documents, ends=ends, state=state)
        by_kernel = delta_kernel(by_row[1], by_row[2], documents, state) is not None
        y, state = rule(*by_row) if by_kernel else recomputed(rule, *by_row)
        return y.transpose(0, 1), state

    def _by_head(self, inner: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v [tokens, batch, key heads or heads, width]. heads: the heads of v."""
        values = heads * self.value_dim
        keys = (inner.shape[-1] - values) // 2
        q, k, v = torch.split(inner, [keys, keys, values], -1)
        queries = of_length_one(in_heads(q, self.key_dim)) * self.key_dim**-0.5
        return queries, of_length_one(in_heads(k, self.key_dim)), in_heads(v, self.value_dim)


def in_heads(x: Tensor, width: int) -> Tensor:
    """[tokens, batch, channels] -> [tokens, batch, heads, width]."""
    return x.view(*x.shape[:2], -1, width)


def of_length_one(x: Tensor) -> Tensor:
    """Divide each head by its length, in float32 or float64."""
    precise = wide(x)
    return precise * torch.rsqrt(precise.square().sum(-1, keepdim=True) + EPSILON_OF_LENGTHS)
