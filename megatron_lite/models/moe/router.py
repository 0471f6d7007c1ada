"""The router: chooses the experts of a token, and their weights.

| scores    | chosen by                     | weights of the chosen                                              |
|-----------|-------------------------------|--------------------------------------------------------------------|
| softmax   | logits                        | softmax over the chosen, or (not renormalized) over all experts    |
| softmax   | softmax + expert_bias         | softmax, without the bias, divided by their sum where renormalized |
| sigmoid   | sigmoid + expert_bias         | sigmoid, without the bias, divided by their sum where renormalized |
| sigmoid   | logits + expert_bias          | the same; of models whose `experts.bias_on_logits` is true         |

With groups of experts, only experts of a token's best groups can be chosen. A group's rank is the sum of its best two
experts, as in transformers. Megatron takes the best per_token // group_topk experts. A model for which this number is
not two never comes from Megatron's checkpoints, and `to_arguments` refuses to save it as one.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megaconv.model.subjects import RANKED_BY
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.moe.balance import (
    Balance,
    by_sequence,
    join,
    load_balancing,
    of_logits,
    over_the_step,
)
from megatron_lite.models.moe.capacity import taken
from megatron_lite.models.moe.counting import count_rows
from megatron_lite.parallel.parameter_kinds import Kind


class Router(nn.Module):
    """The router of one layer.

    Source of the steps: topk_routing_with_score_function of megatron/core/transformer/moe/moe_utils.py.
    """

    kinds: ClassVar = {
        "weight": Kind.OF_TOKENS,
        "bias": Kind.OF_TOKENS,
        "expert_bias": Kind.UNTRAINED,
    }
    in_float32: ClassVar = frozenset({"expert_bias"})

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        experts = plan.config.experts
        self.layer = layer
        self.experts = experts
        self.ranks = plan.ranks
        self.options = plan.options.balance
        self.weight = nn.Parameter(torch.empty(experts.count, plan.config.hidden))
        self.bias = nn.Parameter(torch.empty(experts.count)) if plan.config.mlp.bias else None
        free = torch.empty(experts.count, dtype=torch.float32)
        self.expert_bias = nn.Parameter(free, requires_grad=False) if experts.router_bias else None

    def forward(self, x: Tensor, batch: int, balance: Balance | None) -> tuple[Tensor, Tensor]:
        """Route x [tokens, hidden] -> (weights [tokens, k] in x's dtype, experts int64 [tokens, k]).

        batch: number of tokens at each position of the sequence. A dropped choice has the index after the last expert.
        """
        logits = self._logits(x)
        if balance is not None:
            logits = self._z_loss(logits, balance)
        weights, chosen = self._chosen(logits)
        if self.experts.scale is not None:
            weights = weights * self.experts.scale
        chosen = self._within_capacity(weights, chosen)
        if balance is not None:
            count = self.experts.count
            balance.tokens[self.layer] = count_rows(chosen, count + 1)[:count]
            weights = self._balanced(weights, logits, batch, balance)
        return weights.to(x.dtype), chosen

    def _logits(self, x: Tensor) -> Tensor:
        dtype = getattr(torch, self.options.router_dtype) if self.options.router_dtype else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.weight.to(dtype), bias)

    def _within_capacity(self, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the choices, with the index after the last expert for those that are dropped."""
        count, factor = self.experts.count, self.options.capacity_factor
        if factor is None:
            return chosen
        stay = taken(weights, chosen, count, factor, self.options.drop_policy)
        return chosen.masked_fill(~stay, count)

    def _chosen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the experts of each token."""
        if self.experts.score == "sigmoid":
            wide = logits.float()
            scores = wide.sigmoid()
            return self._of_scores(scores, wide if self.experts.bias_on_logits else scores)
        if self.expert_bias is not None:
            scores = logits.softmax(-1, torch.float32)
            return self._of_scores(scores, scores)
        return self._of_softmax(logits)

    def _of_softmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.experts.renormalize:
            chosen = self._best(logits)
            return logits.gather(1, chosen).softmax(-1, torch.float32), chosen
        probabilities = logits.softmax(-1, torch.float32)
        chosen = self._best(probabilities)
        return probabilities.gather(1, chosen), chosen

    def _of_scores(self, scores: Tensor, unbiased: Tensor) -> tuple[Tensor, Tensor]:
        """Choose by `unbiased` and the bias. Weights are the scores without the bias."""
        bias = self.expert_bias
        chosen = self._best(unbiased if bias is None else unbiased + bias)
        weights = scores.gather(1, chosen)
        return _normalized(weights) if self.experts.renormalize else weights, chosen

    def _best(self, scores: Tensor) -> Tensor:
        """Return int64 [tokens, k]: the experts with the highest scores [tokens, experts]. Not differentiable."""
        scores, experts = scores.detach(), self.experts
        if experts.groups and experts.group_topk and experts.group_topk < experts.groups:
            grouped = scores.view(len(scores), experts.groups, -1)
            of_group = grouped.topk(RANKED_BY, -1).values.sum(-1)
            allowed = (
                torch.zeros_like(of_group)
                .scatter(1, of_group.topk(experts.group_topk, -1).indices, 1)
                .bool()
            )
            scores = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
        return scores.topk(experts.per_token, -1).indices

    def move_bias(self, tokens: Tensor) -> None:
        """Update the bias after a step: lower for busy experts, higher for idle ones. tokens: of all ranks, for each expert."""
        assert self.expert_bias is not None
        wide = tokens.float()
        self.expert_bias.data += self.options.bias_rate * torch.sign(wide.mean() - wide)

    def _z_loss(self, logits: Tensor, balance: Balance) -> Tensor:
        coefficient = self.options.z_loss
        if not coefficient:
            return logits
        found = of_logits(logits, (self.ranks.group, balance.context))
        balance.logged["z_loss", self.layer] = found.detach()
        return join(logits, found, coefficient * balance.share)

    def _balanced(self, weights: Tensor, logits: Tensor, batch: int, balance: Balance) -> Tensor:
        """Add the balancing losses, which ignore the bias and the groups."""
        if not self.options.losses:
            return weights
        sigmoid = self.experts.score == "sigmoid"
        probabilities = (
            _normalized(logits.float().sigmoid()) if sigmoid else logits.softmax(-1, torch.float32)
        )
        chosen = self.experts.per_token
        groups = self.ranks.group, balance.context
        for kind, coefficient in self.options.losses:
            if kind == "aux_loss":
                found = load_balancing(probabilities, chosen, groups)
            elif kind == "global_aux_loss":
                found = over_the_step(probabilities, chosen, self.layer, balance)
            else:
                found = by_sequence(probabilities, chosen, batch, groups)
            balance.logged[kind, self.layer] = found.detach()
            weights = join(weights, found, coefficient * balance.share)
        return weights


def _normalized(scores: Tensor) -> Tensor:
    """Scale each row to sum 1."""
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)
