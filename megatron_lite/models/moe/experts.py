"""What experts make of the rows that came to them, and the mixture of them that a layer may have for its MLP."""

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models.mlp import activate
from megatron_lite.models.moe.dispatch import route
from megatron_lite.models.moe.router import Router
from megatron_lite.models.passes import Pass
from megatron_lite.models.plan import Plan
from megatron_lite.parallel.kinds import Kind
from megatron_lite.parallel.tensor import ColumnLinear, RowLinear, adapted


class ExpertMatrix(nn.Module):
    kinds: ClassVar = {"weight": Kind.EXPERT, "bias": Kind.EXPERT}

    def __init__(self, width: int, out: int, *, bias: bool) -> None:
        super().__init__()
        self.adapter: nn.Module | None = None
        self.weight = nn.Parameter(torch.empty(out, width))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Its own bias is for the caller to give or to add, who may weigh it."""
        return adapted(F.linear(x, self.weight, bias), self.adapter, x)


class Expert(nn.Module):
    """[gate; up], activation, down; with expert tensor parallelism this rank's part of these, whose output is a term of a sum."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.shape = plan.config.mlp
        ffn, hidden = plan.sizes["moe_ffn"], plan.config.hidden
        self.linear_fc1 = ExpertMatrix(hidden, ffn * (2 if self.shape.gated else 1), bias=self.shape.bias)
        self.linear_fc2 = ExpertMatrix(ffn, hidden, bias=self.shape.bias)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [rows, hidden], weights [rows, 1], which multiply the activation, as in Megatron: so no output has to be kept."""
        inner = activate(self.linear_fc1(x, self.linear_fc1.bias), self.shape)
        made: Tensor = self.linear_fc2(inner * weights)
        return made if self.linear_fc2.bias is None else made + self.linear_fc2.bias * weights


class Experts(nn.Module):
    """This rank's, counted from 0."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.local_experts = nn.ModuleList(Expert(plan) for _ in range(plan.sizes["local_experts"]))

    def forward(self, x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
        """x [rows, hidden], sorted by expert, of whom each has so many. One without rows is called too, for its gradient of 0."""
        parts = zip(self.local_experts, torch.split(x, counts), torch.split(weights, counts), strict=True)
        return torch.cat([expert(rows, weight) for expert, rows, weight in parts])


class SharedExperts(nn.Module):
    """The expert that every token passes; its gate, where it has one, scales what it makes."""

    kinds: ClassVar = {"gate_weight": Kind.OF_TOKENS}

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        config, ffn = plan.config, plan.sizes["shared_ffn"]
        self.shape = config.mlp
        self.gate_weight = nn.Parameter(torch.empty(1, config.hidden)) if config.experts.shared_gate else None
        self.linear_fc1 = ColumnLinear(config.hidden, ffn * (2 if self.shape.gated else 1), plan.ranks)
        self.linear_fc2 = RowLinear(ffn, config.hidden, plan.ranks, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear_fc2(activate(self.linear_fc1(x), self.shape))
        return made if self.gate_weight is None else made * F.linear(x, self.gate_weight).sigmoid()


class Mixture(nn.Module):
    """Router, experts of this rank and of others, shared experts. Its input is normed already."""

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        self.count, self.ranks = plan.config.experts.count, plan.expert_ranks
        self.router = Router(plan, layer)
        self.experts = Experts(plan)
        self.shared_experts = SharedExperts(plan) if plan.config.experts.shared_ffn else None

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden]."""
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat, x.shape[1], run.balance)
        way = route(chosen, self.count, self.ranks)
        rows, scaled = way.there(flat[way.token]), way.there(weights.flatten()[way.slot].unsqueeze(1))
        made = way.back(self.experts(rows, scaled, way.counts))
        mixed = torch.zeros_like(flat).index_add(0, way.token, made).view_as(x)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x)
