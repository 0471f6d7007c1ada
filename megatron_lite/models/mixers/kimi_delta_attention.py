"""Kimi delta attention (arXiv 2510.26692), one of the mixers of a layer. Its input is already normed.

    q, k, v, b = linear_qkvb(u)              q, k, v = silu(conv1d(q, k, v))      q, k are divided by their lengths
    f, z       = linear_gates_down(u)        both as narrow as one head
    g = -exp(A_log) softplus(linear_forget_up(f) + dt_bias)                       for each channel of a key
    y = kimi_delta_rule(q, k, v, g, sigmoid(b))
    out_proj(norm(y) * sigmoid(linear_gate_up(z)))                                the norm is over the channels of each head

The matrix that projects down is replicated on every tensor rank. All others are sharded by heads.
Source: modeling_kimi_linear.py of transformers 5.23.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models.build_plan import Plan
from megatron_lite.models.mixers.convolution import Convolution
from megatron_lite.models.mixers.delta_scan import heads_of_qkv, in_heads, scanned
from megatron_lite.models.mixers.gated_delta_net import HeadNorm
from megatron_lite.models.mixers.heads_over_context import (
    Heads,
    all_heads_of_own_tokens,
    own_heads,
    own_heads_of_all_tokens,
)
from megatron_lite.models.mixers.state_parameters import DELTA_NET_IN_FLOAT32
from megatron_lite.models.passes import Packed, Pass
from megatron_lite.models.state_space.kernels import kimi_delta_kernel
from megatron_lite.models.state_space.kimi_delta import kimi_delta_rule, kimi_delta_step
from megatron_lite.models.whole_linear import WholeLinear
from megatron_lite.parallel.context import ContextGroup
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import ColumnLinear, RowLinear
from megatron_lite.products.wide import wide


class KimiDeltaAttention(nn.Module):
    """Kimi delta attention. Its input is already normed."""

    kinds: ClassVar = {"A_log": Kind.SHARDED, "dt_bias": Kind.SHARDED}
    in_float32: ClassVar = DELTA_NET_IN_FLOAT32

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        hidden, linear, ranks = plan.config.hidden, plan.config.linear, plan.ranks
        heads = plan.sizes["linear_value_heads"]
        self.layer, self.heads = layer, heads
        self.key_dim, self.value_dim = linear.key_dim, linear.value_dim
        keys, values = heads * linear.key_dim, heads * linear.value_dim
        of_keys, of_values = Heads(heads, linear.key_dim), Heads(heads, linear.value_dim)
        self.parts = (of_keys, of_keys, of_values)
        self.widths = [2 * keys + values, heads]
        self.linear_qkvb = ColumnLinear(hidden, sum(self.widths), ranks)
        self.linear_gates_down = WholeLinear(hidden, 2 * linear.value_dim)
        self.linear_forget_up = ColumnLinear(linear.value_dim, keys, ranks)
        self.linear_gate_up = ColumnLinear(linear.value_dim, values, ranks)
        self.conv1d = Convolution(2 * keys + values, linear.conv, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(keys))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.out_norm = HeadNorm(
            linear.value_dim, plan.norm.epsilon, zero_centered=False, gate=torch.sigmoid
        )
        self.out_proj = RowLinear(values, hidden, ranks, bias=False)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        # [tokens, batch, channels of q, k and v], [.., heads]
        inner, write = self.linear_qkvb(x).split(self.widths, -1)
        narrow_forget, narrow_gate = self.linear_gates_down(x).chunk(2, -1)
        forget: Tensor = self.linear_forget_up(narrow_forget)
        gate: Tensor = self.linear_gate_up(narrow_gate)
        context = run.context
        inner = own_heads_of_all_tokens(inner, self.parts, context)
        forget = own_heads_of_all_tokens(forget, self.parts[:1], context)
        write = own_heads_of_all_tokens(write, (Heads(self.heads),), context)
        weight = own_heads(self.conv1d.weight, self.parts, context)
        before, state = run.states(self.layer, 2)
        inner, before = self.conv1d.apply_to(inner, weight, None, run.documents, before)
        decay = self._decay(forget, context)
        y, state = self._scan(inner, decay, wide(write).sigmoid(), run.packed, state)
        run.keep(self.layer, before, state)
        y = all_heads_of_own_tokens(y, context)
        normed = self.out_norm(y, in_heads(gate, self.value_dim))
        projected: Tensor = self.out_proj(normed.flatten(2))
        return projected

    def _decay(self, forget: Tensor, context: ContextGroup | None) -> Tensor:
        """Return the logarithm of the decay [tokens, batch, heads, key] of the heads that this rank computes.

        forget: the input for these heads, [tokens, batch, channels].
        """
        dt_bias = own_heads(self.dt_bias, self.parts[:1], context)
        a_log = own_heads(self.A_log, (Heads(self.heads),), context)
        time_steps = F.softplus(wide(forget) + wide(dt_bias))
        return -wide(a_log).exp().unsqueeze(-1) * in_heads(time_steps, self.key_dim)

    def _scan(
        self,
        inner: Tensor,
        decay: Tensor,
        beta: Tensor,
        packed: Packed | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (y [tokens, batch, heads, width], the last state). inner: q, k and v [tokens, batch, channels]."""
        q, k, v = heads_of_qkv(inner, decay.shape[-2], self.key_dim, self.value_dim)
        if state is not None and len(v) == 1:
            y, state = kimi_delta_step(q[0], k[0], v[0], decay[0], beta[0], state)
            return y.unsqueeze(0), state
        return scanned(kimi_delta_rule, kimi_delta_kernel, (q, k, v, decay, beta), packed, state)
