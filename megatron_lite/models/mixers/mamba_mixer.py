"""The Mamba 2 mixer (arXiv 2405.21060), one of the mixers of a layer.

    z, x, B, C, dt = in_proj(norm(u))        x, B, C = silu(conv1d(x, B, C))        y = ssd(x, softplus(dt + dt_bias), ...)
    out_proj(norm(y * silu(z)))              the norm is over the channels of each group of heads

In some models the norm is before the gate, or there is none.

Tensor parallelism shards heads and groups, so that each norm lies on one rank. Source: modeling_nemotron_h.py of
transformers 5; mamba_mixer.py of megatron-core 0.16.1.
"""

from functools import partial
from math import inf
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megaconv.megatron.arguments.mamba import mixer_epsilon
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.input_matrix import input_matrix
from megatron_lite.models.mixers.convolution import Convolution
from megatron_lite.models.mixers.heads_over_context import (
    Heads,
    all_heads_of_own_tokens,
    own_heads,
    own_heads_of_all_tokens,
)
from megatron_lite.models.mixers.state_parameters import CONVOLUTION, MAMBA_IN_FLOAT32
from megatron_lite.models.passes import Pass
from megatron_lite.models.recompute import recomputed
from megatron_lite.models.state_space.kernels import scan_kernel
from megatron_lite.models.state_space.mamba2 import ssd, ssd_step
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import RowLinear


class Gate(nn.Module):
    """The gate of a mixer without a norm at its end."""

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """y, gate [tokens, batch, channels] -> the same shape, in y's dtype."""
        return (y.float() * F.silu(gate.float())).to(y.dtype)


class GatedGroupNorm(nn.Module):
    """RMSNorm over each group's channels, after the gate or before it."""

    kinds: ClassVar = {"weight": Kind.SHARDED}

    def __init__(self, groups: int, width: int, epsilon: float, *, before_gate: bool) -> None:
        """groups, width: of this rank."""
        super().__init__()
        self.groups, self.epsilon, self.before_gate = groups, epsilon, before_gate
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """y, gate [tokens, batch, channels] -> the same shape, in y's dtype."""
        factors = F.silu(gate.float())
        if self.before_gate:
            return (self._normed(y.float()) * self.weight.float() * factors).to(y.dtype)
        return self._normed(y.float() * factors).to(y.dtype) * self.weight

    def _normed(self, x: Tensor) -> Tensor:
        by_group = x.view(*x.shape[:-1], self.groups, -1)
        return F.rms_norm(by_group, by_group.shape[-1:], eps=self.epsilon).flatten(-2)


class MambaMixer(nn.Module):
    """Mamba 2 with the norm before it."""

    kinds: ClassVar = {"A_log": Kind.SHARDED, "D": Kind.SHARDED, "dt_bias": Kind.SHARDED}
    in_float32: ClassVar = MAMBA_IN_FLOAT32

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        config, mamba = plan.config, plan.config.mamba
        heads, groups = plan.sizes["mamba_heads"], plan.sizes["mamba_groups"]
        self.layer, self.heads, self.state = layer, heads, mamba.state
        self.least_time_step = mamba.least_time_step or 0.0
        self.parts = (
            Heads(heads, mamba.head_dim),
            Heads(groups, mamba.state),
            Heads(groups, mamba.state),
        )
        inner, states = heads * mamba.head_dim, groups * mamba.state
        self.widths = [inner, inner + 2 * states, heads]
        self.in_proj = input_matrix(plan, sum(self.widths), bias=False)
        factors = config.factors
        self.gate_and_times = factors.mamba_z, factors.mamba_dt
        self.factors = factors.mamba_x, factors.mamba_b, factors.mamba_c
        self.conv1d = Convolution(inner + 2 * states, CONVOLUTION, bias=True)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        before_gate = mamba.norm == "before_gate"
        self.norm: nn.Module = Gate()
        if mamba.norm != "none":
            epsilon = mixer_epsilon(config)
            self.norm = GatedGroupNorm(groups, inner, epsilon, before_gate=before_gate)
        self.out_proj = RowLinear(inner, config.hidden, plan.ranks, bias=False)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        gate, inner, times = self._scaled(*self.in_proj(x).split(self.widths, -1))
        context, each_head = run.context, (Heads(self.heads),)
        inner = own_heads_of_all_tokens(inner, self.parts, context)
        times = own_heads_of_all_tokens(times, each_head, context)
        weight = own_heads(self.conv1d.weight, self.parts, context)
        assert self.conv1d.bias is not None
        bias = own_heads(self.conv1d.bias, self.parts, context)
        dt_bias = own_heads(self.dt_bias, each_head, context)
        a_log = own_heads(self.A_log, each_head, context)
        d = own_heads(self.D, each_head, context)
        before, state = run.states(self.layer, 2)
        inner, before = self.conv1d.apply_to(inner, weight, bias, run.documents, before)
        steps = F.softplus(times.float() + dt_bias.float()).clamp(self.least_time_step, inf)
        decays = -a_log.float().exp()
        x, b, c = self._parts_of(inner, steps.shape[-1])
        y, state = _scan(x, steps, decays, b, c, d, run.documents, state)
        run.keep(self.layer, before, state)
        y = all_heads_of_own_tokens(y, context)
        normed: Tensor = self.norm(y.flatten(2), gate)
        projected: Tensor = self.out_proj(normed)
        return projected

    def _scaled(self, gate: Tensor, inner: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Multiply the parts of the projection with the model's factors, if it has any."""
        of_gate, of_times = self.gate_and_times
        if {of_gate, of_times, *self.factors} == {1.0}:
            return gate, inner, times
        widths = [heads.number * heads.width for heads in self.parts]
        parts = zip(torch.split(inner, widths, -1), self.factors, strict=True)
        return (
            gate * of_gate,
            torch.cat([part * factor for part, factor in parts], -1),
            times * of_times,
        )

    def _parts_of(self, inner: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, B and C [tokens, batch, heads or groups, width]. inner: [tokens, batch, channels]."""
        width = self.parts[0].width
        channels = heads * width
        states = (inner.shape[-1] - channels) // 2
        x, b, c = torch.split(inner, [channels, states, states], -1)
        return _by_head(x, width), _by_head(b, self.state), _by_head(c, self.state)


def _by_head(x: Tensor, width: int) -> Tensor:
    return x.view(*x.shape[:2], -1, width)


def _scan(
    x: Tensor,
    steps: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    documents: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (y [tokens, batch, heads, width], the last state). x, steps, b, c: tokens first."""
    if state is not None and len(x) == 1:
        y, state = ssd_step(x[0], steps[0], a, b[0], c[0], d, state)
        return y.unsqueeze(0), state
    inputs = x.transpose(0, 1)
    times = steps.transpose(0, 1)
    keys = b.transpose(0, 1)
    queries = c.transpose(0, 1)
    scan = partial(ssd, documents=documents, state=state)
    if scan_kernel(inputs, documents, state) is None:
        scan = partial(recomputed, scan)
    y, state = scan(inputs, times, a, keys, queries, d)
    return y.transpose(0, 1), state
