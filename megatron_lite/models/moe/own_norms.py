"""A mixture whose router, routed experts and shared expert have norms of their own (Gemma 4).

    input ─▶ norm ─▶ router ─────────▶ weights, each times a stored number of its expert
    input ─▶ norm ─▶ routed experts ─▶ norm ─▶ + ─▶ norm ─▶ output
    input ─▶ norm ─▶ shared expert ──▶ norm ───┘

Source: Gemma4TextDecoderLayer and Gemma4TextRouter of transformers 5.24.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_lite.models.build_plan import Plan
from megatron_lite.models.moe.experts import Mixture
from megatron_lite.models.moe.router import Router
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import Norm


class NormedRouter(Router):
    """A router after a norm, with a trained factor on the weights of each expert."""

    kinds: ClassVar = {**Router.kinds, "expert_scale": Kind.OF_TOKENS}

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__(plan, layer)
        config = plan.config
        self.norm = Norm(config.hidden, plan.norm)
        self.factor = config.hidden**-0.5
        self.expert_scale = nn.Parameter(torch.empty(config.experts.count))

    def _logits(self, x: Tensor) -> Tensor:
        return super()._logits(self.norm(x) * self.factor)

    def _chosen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super()._chosen(logits)
        return weights * self.expert_scale[chosen], chosen


class NormedMixture(Mixture):
    """The mixture. Its input isn't normed."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__(plan, layer)
        hidden = plan.config.hidden
        self.experts_norm = Norm(hidden, plan.norm)
        self.experts_output_norm = Norm(hidden, plan.norm)
        self.shared_norm = Norm(hidden, plan.norm)
        self.shared_output_norm = Norm(hidden, plan.norm)

    def make_router(self, plan: Plan, layer: int) -> Router:
        return NormedRouter(plan, layer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as in Mixture
    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        assert self.shared_experts is not None
        assert self.post_layernorm is not None
        routed = self.experts_output_norm(self._routed(x, self.experts_norm(x), run))
        shared = self.shared_output_norm(self.shared_experts(self.shared_norm(x)))
        made: Tensor = self.post_layernorm(routed + shared)
        return made
