"""The gated delta net (arXiv 2412.06464), one of the mixers of a layer.

    q, k, v, z, b, a = in_proj(norm(u))      q, k, v = silu(conv1d(q, k, v))      q, k are divided by their lengths
    y = gated_delta_rule(q, k, v, -exp(A_log) softplus(a + dt_bias), sigmoid(b))
    out_proj(norm(y) * silu(z))              the norm is over the channels of each head

Source: modeling_qwen3_next.py of transformers 5; gated_delta_net.py of megatron-core 0.16.1.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models.build_plan import Plan
from megatron_lite.models.mixers.convolution import Convolution
from megatron_lite.models.mixers.delta_scan import heads_of_qkv, scanned
from megatron_lite.models.mixers.heads_over_context import (
    Heads,
    all_heads_of_own_tokens,
    own_heads,
    own_heads_of_all_tokens,
)
from megatron_lite.models.mixers.state_parameters import DELTA_NET_IN_FLOAT32
from megatron_lite.models.passes import Packed, Pass
from megatron_lite.models.state_space.gated_delta import gated_delta_rule, gated_delta_step
from megatron_lite.models.state_space.kernels import delta_kernel
from megatron_lite.parallel.context import ContextGroup
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import Made, NormColumnLinear, RowLinear
from megatron_lite.products.wide import wide


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
        context, each_head = run.context, (Heads(self.heads),)
        inner = own_heads_of_all_tokens(inner, self.parts, context)
        write = own_heads_of_all_tokens(write, each_head, context)
        forget = own_heads_of_all_tokens(forget, each_head, context)
        weight = own_heads(self.conv1d.weight, self.parts, context)
        before, state = run.states(self.layer, 2)
        inner, before = self.conv1d.apply_to(inner, weight, None, run.documents, before)
        decay = self._decay(forget, context)
        beta = wide(write).sigmoid() * self.most_written
        y, state = self._scan(inner, decay, beta, run.packed, state)
        run.keep(self.layer, before, state)
        y = all_heads_of_own_tokens(y, context)
        normed = self.out_norm(y, gate.unflatten(-1, (self.heads, -1)))
        projected: Tensor = self.out_proj(normed.flatten(2))
        return projected

    def _decay(self, forget: Tensor, context: ContextGroup | None) -> Tensor:
        """Return the logarithm of the decay [tokens, batch, heads] of the heads that this rank computes. forget: their input."""
        each_head = (Heads(self.heads),)
        dt_bias = own_heads(self.dt_bias, each_head, context)
        a_log = own_heads(self.A_log, each_head, context)
        time_steps = F.softplus(wide(forget) + wide(dt_bias))
        return -wide(a_log).exp() * time_steps

    def _scan(
        self,
        inner: Tensor,
        decay: Tensor,
        beta: Tensor,
        packed: Packed | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (y [tokens, batch, heads, width], the last state). inner: q, k and v [tokens, batch, channels]."""
        q, k, v = heads_of_qkv(inner, decay.shape[-1], self.key_dim, self.value_dim)
        if state is not None and len(v) == 1:
            y, state = gated_delta_step(q[0], k[0], v[0], decay[0], beta[0], state)
            return y.unsqueeze(0), state
        return scanned(gated_delta_rule, delta_kernel, (q, k, v, decay, beta), packed, state)
