"""Losses that keep experts equally busy. They are not part of the loss that is reported: their gradients join on the way back.

With T tokens, E experts of which k are chosen, f_e tokens whose best k scores include e, and P_te the scores:
    aux = c * E / (k * T^2) * sum_e f_e * sum_t P_te            z = c * mean_t logsumexp(logits_t)^2
as megatron/core/transformer/moe/moe_utils.py has them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel import comm
from megatron_lite.parallel.tensor import TensorGroup


@dataclass(frozen=True)
class Balance:
    """Of one pass of a microbatch."""

    share: float
    """Of this microbatch in the step's loss: what gradients of these losses are multiplied with."""
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


def load_balancing(probabilities: Tensor, per_token: int, ranks: TensorGroup) -> Tensor:
    """aux without c, float32 []. probabilities float32 [tokens of this rank, experts]; over tensor ranks the sum is the loss."""
    busy = _busy(probabilities, per_token)
    tokens = len(probabilities)
    if ranks.group is not None:
        comm.all_reduce(busy, ranks.group)
        tokens *= ranks.size
    experts = probabilities.shape[-1]
    return (busy * probabilities.sum(0)).sum() * (experts / (per_token * tokens * tokens))


def by_sequence(probabilities: Tensor, per_token: int, batch: int, ranks: TensorGroup) -> Tensor:
    """The same for each sequence apart, and the mean over them. tokens in the order of [sequence, batch]."""
    each = probabilities.view(-1, batch, probabilities.shape[-1])
    busy = torch.stack([_busy(each[:, row], per_token) for row in range(batch)])
    length = each.shape[0]
    if ranks.group is not None:
        comm.all_reduce(busy, ranks.group)
        length *= ranks.size
    experts = probabilities.shape[-1]
    return (busy * each.sum(0)).sum() * (experts / (per_token * length * length * batch))


def _busy(probabilities: Tensor, per_token: int) -> Tensor:
    """float32 [experts]: tokens whose best scores include each; without a gradient."""
    best = probabilities.detach().topk(per_token, -1).indices
    return torch.bincount(best.flatten(), minlength=probabilities.shape[-1]).to(probabilities.dtype)


def of_logits(logits: Tensor, ranks: TensorGroup) -> Tensor:
    """z without c; over tensor ranks the sum is the loss."""
    return torch.logsumexp(logits.float(), -1).square().mean() / ranks.size
