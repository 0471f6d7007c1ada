"""Losses that keep experts equally busy. They are not part of the loss that is reported: their gradients join on the way back.

With T tokens, E experts of which k are chosen, f_e tokens whose best k scores include e, and P_te the scores:
    aux = c * E / (k * T^2) * sum_e f_e * sum_t P_te            z = c * mean_t logsumexp(logits_t)^2
as megatron/core/transformer/moe/moe_utils.py has them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel import comm


@dataclass(frozen=True)
class Step:
    """What microbatches of a step know of those before them."""

    groups: Sequence[comm.Group] = ()
    """Together they reach all ranks that have other tokens of the same layers."""
    busy: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    """By layer, f_e of all ranks' tokens, summed over so many microbatches."""


@dataclass(frozen=True)
class Balance:
    """Of one pass of a microbatch."""

    share: float
    """Of this microbatch in the step's loss: what gradients of these losses are multiplied with."""
    step: Step = field(default_factory=Step)
    context: comm.Group = None
    """The ranks that have the other tokens of each sequence."""
    mean_busy: dict[int, Tensor] = field(default_factory=dict)
    """By layer, f_e of all ranks' tokens, the mean of this microbatch and those before it; kept for when it is computed again."""
    logged: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """By name and layer, before the coefficient; the same again when a layer is computed again."""
    tokens: dict[int, Tensor] = field(default_factory=dict)
    """By layer, how many of this rank's tokens went to each expert: int64 [experts]; likewise."""


def tokens_by_layer(balances: Iterable[Balance]) -> dict[int, Tensor]:
    """The sums over several passes."""
    found: dict[int, Tensor] = {}
    for balance in balances:
        for layer, tokens in balance.tokens.items():
            found[layer] = found[layer] + tokens if layer in found else tokens
    return found


def mean_losses(balances: Sequence[Balance]) -> dict[str, dict[int, float]]:
    """By name and layer what was logged, over several passes."""
    sums: dict[str, dict[int, float]] = {}
    for balance in balances:
        for (name, layer), value in balance.logged.items():
            layers = sums.setdefault(name, {})
            layers[layer] = layers.get(layer, 0.0) + float(value)
    return {name: {layer: value / len(balances) for layer, value in layers.items()} for name, layers in sums.items()}


class _Join(torch.autograd.Function):
    """x as it is; on the way back `factor` goes to a loss that nobody has added to anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.like = factor, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full_like(ctx.like, ctx.factor), None


def join(x: Tensor, loss: Tensor, factor: float) -> Tensor:
    joined: Tensor = _Join.apply(x, loss, factor)  # type: ignore[no-untyped-call]
    return joined


def load_balancing(probabilities: Tensor, per_token: int, groups: Sequence[comm.Group]) -> Tensor:
    """aux without c, float32 []. probabilities float32 [tokens of this rank, experts].

    groups: together they reach the ranks with other tokens of the same rows; over those the sum is the loss.
    """
    busy = _busy(probabilities, per_token)
    tokens = len(probabilities)
    for group in groups:
        comm.all_reduce(busy, group)
        tokens *= comm.size(group)
    experts = probabilities.shape[-1]
    return (busy * probabilities.sum(0)).sum() * (experts / (per_token * tokens * tokens))


def by_sequence(probabilities: Tensor, per_token: int, batch: int, groups: Sequence[comm.Group]) -> Tensor:
    """The same for each sequence apart, and the mean over them. tokens in the order of [sequence, batch]."""
    each = probabilities.view(-1, batch, probabilities.shape[-1])
    busy = torch.stack([_busy(each[:, row], per_token) for row in range(batch)])
    length = each.shape[0]
    for group in groups:
        comm.all_reduce(busy, group)
        length *= comm.size(group)
    experts = probabilities.shape[-1]
    return (busy * each.sum(0)).sum() * (experts / (per_token * length * length * batch))


def over_the_step(probabilities: Tensor, per_token: int, layer: int, balance: Balance) -> Tensor:
    """aux without c, where T and f are those of all ranks, f the mean over the microbatches so far; over ranks the sum is the loss."""
    step, ranks = balance.step, math.prod(comm.size(group) for group in balance.step.groups)
    if layer not in balance.mean_busy:
        busy = _busy(probabilities, per_token)
        for group in step.groups:
            comm.all_reduce(busy, group)
        before, passes = step.busy.get(layer, (torch.zeros_like(busy), 0))
        step.busy[layer] = before + busy, passes + 1
        balance.mean_busy[layer] = step.busy[layer][0] / (passes + 1)
    tokens, experts = len(probabilities) * ranks, probabilities.shape[-1]
    return (balance.mean_busy[layer] * probabilities.sum(0)).sum() * (experts / (per_token * tokens * tokens))


def _busy(probabilities: Tensor, per_token: int) -> Tensor:
    """float32 [experts]: tokens whose best scores include each; without a gradient."""
    best = probabilities.detach().topk(per_token, -1).indices
    return torch.bincount(best.flatten(), minlength=probabilities.shape[-1]).to(probabilities.dtype)


def of_logits(logits: Tensor, groups: Sequence[comm.Group]) -> Tensor:
    """z without c; over the ranks of all groups the sum is the loss."""
    return torch.logsumexp(logits.float(), -1).square().mean() / math.prod(comm.size(group) for group in groups)
