"""Which experts a token goes to, and with which weights: softmax over those that were chosen, or over all of them before."""

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models.moe.balance import Balance, by_sequence, join, load_balancing, of_logits
from megatron_lite.models.plan import Plan
from megatron_lite.parallel.kinds import Kind


class Router(nn.Module):
    """Source of the steps: topk_routing_with_score_function of megatron/core/transformer/moe/moe_utils.py."""

    kinds: ClassVar = {"weight": Kind.OF_TOKENS}

    def __init__(self, plan: Plan, layer: int) -> None:
        super().__init__()
        experts = plan.config.experts
        self.layer, self.experts, self.ranks, self.options = layer, experts, plan.ranks, plan.options.balance
        self.weight = nn.Parameter(torch.empty(experts.count, plan.config.hidden))

    def forward(self, x: Tensor, batch: int, balance: Balance | None) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden], batch of them at each place of the sequence -> (weights [tokens, k] in x's dtype, experts int64)."""
        dtype = getattr(torch, self.options.router_dtype) if self.options.router_dtype else x.dtype
        logits = F.linear(x.to(dtype), self.weight.to(dtype))
        if balance is not None:
            logits = self._z_loss(logits, balance)
        k = self.experts.per_token
        if self.experts.renormalize:
            best = logits.topk(k, -1)
            weights = best.values.softmax(-1, torch.float32)
        else:
            best = logits.softmax(-1, torch.float32).topk(k, -1)
            weights = best.values
        if self.experts.scale is not None:
            weights = weights * self.experts.scale
        if balance is not None:
            weights = self._balanced(weights, logits, batch, balance)
        return weights.to(x.dtype), best.indices

    def _z_loss(self, logits: Tensor, balance: Balance) -> Tensor:
        coefficient = self.options.z_loss
        if not coefficient:
            return logits
        found = of_logits(logits, self.ranks)
        balance.logged["z_loss", self.layer] = found.detach()
        return join(logits, found, coefficient * balance.share)

    def _balanced(self, weights: Tensor, logits: Tensor, batch: int, balance: Balance) -> Tensor:
        probabilities = logits.softmax(-1, torch.float32)
        for kind, coefficient in self.options.losses:
            if kind == "aux_loss":
                found = load_balancing(probabilities, self.experts.per_token, self.ranks)
            else:
                found = by_sequence(probabilities, self.experts.per_token, batch, self.ranks)
            balance.logged[kind, self.layer] = found.detach()
            weights = join(weights, found, coefficient * balance.share)
        return weights
