"""The computation of experts, and the mixture-of-experts MLP of a layer."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megaconv.planning.capacity import capacity_of
from megatron_lite.models.activation import activate
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.moe.counting import RowNumbers
from megatron_lite.models.moe.dispatch import by_exchange
from megatron_lite.models.moe.gathering import by_gathering
from megatron_lite.models.moe.grouped import grouped_linear
from megatron_lite.models.moe.router import Router
from megatron_lite.models.passes import Pass
from megatron_lite.models.whole_linear import WholeLinear
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import ColumnLinear, Matrix, Norm, RowLinear
from megatron_lite.products.product import PLAIN


def activation_of(plan: Plan) -> Callable[..., Tensor]:
    """Return `activate`, compiled for any number of rows if layers are compiled."""
    if not plan.options.compile:
        return activate
    compiled = torch.compile(activate, dynamic=True)

    def activated(x: Tensor, *others: Any, **how: Any) -> Tensor:
        # A graph for any number of rows serves two and more; torch would compile another one for a single row.
        chosen = compiled if len(x) > 1 else activate
        made: Tensor = chosen(x, *others, **how)
        return made

    return activated


class ExpertMatrix(Matrix):
    """A matrix of one expert. Experts.forward computes with the matrices of all experts at once."""

    kinds: ClassVar = {"weight": Kind.EXPERT, "bias": Kind.EXPERT}

    def __init__(self, width: int, out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None


class Expert(nn.Module):
    """[gate; up], activation, down. With expert tensor parallelism this is the rank's part, whose output is a term of a sum."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        shape, ffn, hidden = plan.config.mlp, plan.sizes["moe_ffn"], plan.sizes["expert_hidden"]
        self.linear_fc1 = ExpertMatrix(hidden, ffn * (2 if shape.gated else 1), bias=shape.bias)
        self.linear_fc2 = ExpertMatrix(ffn, hidden, bias=shape.bias)


class Experts(nn.Module):
    """This rank's experts, counted from 0."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.shape, self.limit = plan.config.mlp, plan.limit
        self.activate = activation_of(plan)
        self.on_input = plan.config.experts.probs_on_input
        self.local_experts = nn.ModuleList(Expert(plan) for _ in range(plan.sizes["local_experts"]))

    def forward(self, x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
        """x [rows, expert_hidden], sorted by expert; counts: rows of each expert; weights [rows, 1] -> the shape of x.

        As in Megatron, the weights multiply the activation, so that no output has to be kept. In some models they
        multiply the input (Llama 4).
        """
        factors = None if self.on_input else weights
        x = x * weights if self.on_input else x
        fc1, fc2 = (list(self._matrices(name)) for name in ("linear_fc1", "linear_fc2"))
        inner, bias = _products(fc1, x, counts), _biases(fc1, counts)
        inner = inner if bias is None else inner + bias
        made = _products(fc2, self.activate(inner, self.shape, factors, self.limit), counts)
        bias = _biases(fc2, counts)
        if bias is None:
            return made
        return made + (bias if factors is None else bias * factors)

    def _matrices(self, name: str) -> Iterator[ExpertMatrix]:
        for expert in self.local_experts:
            matrix = getattr(expert, name)
            assert isinstance(matrix, ExpertMatrix)
            yield matrix


def _products(matrices: Sequence[ExpertMatrix], x: Tensor, counts: list[int]) -> Tensor:
    """Return [rows, out]: products plus adapters, without biases."""
    if all(matrix.product is PLAIN for matrix in matrices):
        made = grouped_linear(x, [matrix.weight for matrix in matrices], counts)
    else:
        each = zip(matrices, torch.split(x, counts), strict=True)
        made = torch.cat([matrix.product.linear(rows, matrix.weight) for matrix, rows in each])
    if all(matrix.adapter is None for matrix in matrices):
        return made
    parts = zip(matrices, torch.split(made, counts), torch.split(x, counts), strict=True)
    return torch.cat([matrix.adapted(part, rows) for matrix, part, rows in parts])


def _biases(matrices: Sequence[ExpertMatrix], counts: list[int]) -> Tensor | None:
    """Return [rows, out]: the bias of each row's expert; None if there are no biases."""
    biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
    return (
        torch.cat([bias.expand(count, -1) for bias, count in zip(biases, counts, strict=True)])
        if biases
        else None
    )


class SharedExperts(nn.Module):
    """The expert that every token passes. If it has a gate, the gate scales its output."""

    kinds: ClassVar = {"gate_weight": Kind.OF_TOKENS}

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        hidden = plan.config.hidden
        ffn = plan.sizes["shared_ffn"]
        self.shape, self.limit = plan.config.mlp, plan.shared_limit
        self.activate = activation_of(plan)
        self.gate_weight = None
        if plan.config.experts.shared_gate:
            self.gate_weight = nn.Parameter(torch.empty(1, hidden))
        up = 2 * ffn if self.shape.gated else ffn
        self.linear_fc1 = ColumnLinear(hidden, up, plan.ranks)
        self.linear_fc2 = RowLinear(ffn, hidden, plan.ranks, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activate(self.linear_fc1(x), self.shape, limit=self.limit)
        made: Tensor = self.linear_fc2(inner)
        return made if self.gate_weight is None else made * F.linear(x, self.gate_weight).sigmoid()


DISPATCHERS = {"alltoall": by_exchange, "allgather": by_gathering}
"""The methods to exchange tokens with other ranks' experts, by Megatron's names."""


def _projections(plan: Plan) -> tuple[WholeLinear | None, WholeLinear | None]:
    """Return the projections to the experts' own width and back; None for both if this is the hidden width."""
    hidden, latent = plan.config.hidden, plan.config.experts.latent
    if not latent:
        return None, None
    return WholeLinear(hidden, latent), WholeLinear(latent, hidden)


class Mixture(nn.Module):
    """Router, experts of this rank and of others, shared experts, and a norm after them. Its input is already normed.

    The routed experts may have a width of their own, to which a matrix projects the tokens before they are sent.
    """

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        self.count, self.ranks = plan.config.experts.count, plan.expert_ranks
        self.per_token = plan.config.experts.per_token
        self.padded_to = plan.options.balance.padded_to
        self.dispatch = DISPATCHERS[plan.options.dispatcher]
        self.router = self.make_router(plan, layer)
        self.fc1_latent_proj, self.fc2_latent_proj = _projections(plan)
        self.experts = Experts(plan)
        self.shared_experts = SharedExperts(plan) if plan.config.experts.shared_ffn else None
        normed_after = plan.norm_after is not None or plan.config.norm.after_experts
        self.post_layernorm = Norm(plan.config.hidden, plan.norm) if normed_after else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it would recompile for every other number of rows
    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [sequence (/ tp), batch, hidden] -> the same shape."""
        mixed = self._routed(x, x, run)
        made = mixed if self.shared_experts is None else mixed + self.shared_experts(x)
        return made if self.post_layernorm is None else self.post_layernorm(made)

    def make_router(self, plan: Plan, layer: int) -> Router:
        """Return the router of a layer."""
        return Router(plan, layer)

    def _routed(self, routed: Tensor, x: Tensor, run: Pass) -> Tensor:
        """Return the routed experts' output for x. routed: the router's input, as x [sequence (/ tp), batch, hidden]."""
        flat = x.flatten(0, 1)
        projected = flat if self.fc1_latent_proj is None else self.fc1_latent_proj(flat)
        weights, chosen = self.router(routed.flatten(0, 1), x.shape[1], run.balance)
        mixed: Tensor = self.dispatch(
            projected,
            weights,
            chosen,
            self.count,
            self.ranks,
            self.experts,
            self._numbers(run, len(flat)),
        )
        made = mixed if self.fc2_latent_proj is None else self.fc2_latent_proj(mixed)
        return made.view_as(x)

    def _numbers(self, run: Pass, tokens: int) -> RowNumbers:
        """Return the source of numbers of rows. In training, it waits for the device once in a pass; with padding, never."""
        factor = self.padded_to
        if factor is not None:
            return RowNumbers(capacity=capacity_of(tokens, self.per_token, self.count, factor))
        if run.balance is None:
            return RowNumbers()
        return RowNumbers(partial(run.balance.read_rows, self.router.layer))
