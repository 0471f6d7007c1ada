"""Load-balancing losses. The reported loss does not include them; their gradients are added in the backward pass.

With T tokens, E experts of which k are chosen, f_e tokens whose best k scores include e, and P_te the scores:

    aux = c * E / (k * T^2) * sum_e f_e * sum_t P_te            z = c * mean_t logsumexp(logits_t)^2

Source: megatron/core/transformer/moe/moe_utils.py.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lite.models.moe.counting import count_rows
from megatron_lite.parallel import comm


@dataclass(frozen=True)
class Step:
    """The state that the microbatches of a step share."""

    groups: Sequence[comm.Group] = ()
    """Together, these groups reach all ranks that have other tokens of the same layers."""
    busy: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    """By layer: (sum of f_e of all ranks' tokens, number of microbatches in the sum)."""


@dataclass(frozen=True)
class Balance:
    """The state of one pass of a microbatch."""

    share: float
    """Weight of this microbatch in the step's loss: the factor of the gradients of these losses."""
    step: Step = field(default_factory=Step)
    context: comm.Group = None
    """The ranks that have the other tokens of each sequence."""
    mean_busy: dict[int, Tensor] = field(default_factory=dict)
    """By layer: f_e of all ranks' tokens, the mean of the step's microbatches so far. Recomputation uses it again."""
    logged: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """By name and layer, before the coefficient. Recomputation of a layer writes the same value again."""
    tokens: dict[int, Tensor] = field(default_factory=dict)
    """By layer: number of this rank's tokens for each expert, int64 [experts]. Recomputation writes the same value again."""
    rows: dict[int, list[int]] = field(default_factory=dict)
    """By layer: the numbers of rows that the dispatch has read from the device. Recomputation uses them again."""

    def read_rows(self, layer: int, counts: Tensor) -> list[int]:
        """Return the layer's numbers of rows. Only the first call in a pass waits for the device."""
        if layer not in self.rows:
            self.rows[layer] = counts.tolist()
        return self.rows[layer]


def tokens_by_layer(balances: Iterable[Balance]) -> dict[int, Tensor]:
    """Return the sums over several passes."""
    found: dict[int, Tensor] = {}
    for balance in balances:
        for layer, tokens in balance.tokens.items():
            found[layer] = found[layer] + tokens if layer in found else tokens
    return found


def mean_losses(balances: Sequence[Balance]) -> dict[str, dict[int, float]]:
    """Return the mean of the logged losses over several passes, by name and layer."""
    sums: dict[str, dict[int, float]] = {}
    for balance in balances:
        for (name, layer), value in balance.logged.items():
            layers = sums.setdefault(name, {})
            layers[layer] = layers.get(layer, 0.0) + float(value)
    return {
        name: {layer: value / len(balances) for layer, value in layers.items()}
        for name, layers in sums.items()
    }


class _Join(torch.autograd.Function):
    """Return x unchanged. The backward pass gives `factor` as the gradient of `loss`, which is added to nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.like = factor, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full_like(ctx.like, ctx.factor), None


def join(x: Tensor, loss: Tensor, factor: float) -> Tensor:
    """Return x; the backward pass adds the gradient of `factor * loss`."""
    joined: Tensor = _Join.apply(x, loss, factor)  # type: ignore[no-untyped-call]
    return joined


def load_balancing(probabilities: Tensor, per_token: int, groups: Sequence[comm.Group]) -> Tensor:
    """Return aux without c, float32 []. probabilities: float32 [tokens of this rank, experts].

    groups: together they reach the ranks with other tokens of the same rows. The loss is the sum over these ranks.
    """
    busy = _busy(probabilities, per_token)
    tokens = len(probabilities)
    for group in groups:
        comm.all_reduce(busy, group)
        tokens *= comm.size(group)
    experts = probabilities.shape[-1]
    return (busy * probabilities.sum(0)).sum() * (experts / (per_token * tokens * tokens))


def by_sequence(
    probabilities: Tensor, per_token: int, batch: int, groups: Sequence[comm.Group]
) -> Tensor:
    """Return aux without c for each sequence separately, as the mean over sequences.

    Tokens are in the order of [sequence, batch].
    """
    each = probabilities.view(-1, batch, probabilities.shape[-1])
    busy = torch.stack([_busy(each[:, row], per_token) for row in range(batch)])
    length = each.shape[0]
    for group in groups:
        comm.all_reduce(busy, group)
        length *= comm.size(group)
    experts = probabilities.shape[-1]
    return (busy * each.sum(0)).sum() * (experts / (per_token * length * length * batch))


def over_the_step(probabilities: Tensor, per_token: int, layer: int, balance: Balance) -> Tensor:
    """Return aux without c, with T and f of all ranks and f averaged over the microbatches so far.

    The loss is the sum over the ranks.
    """
    if layer not in balance.mean_busy:
        _count_busy(probabilities, per_token, layer, balance)
    busy = balance.mean_busy[layer]
    ranks = math.prod(comm.size(group) for group in balance.step.groups)
    tokens = len(probabilities) * ranks
    experts = probabilities.shape[-1]
    return (busy * probabilities.sum(0)).sum() * (experts / (per_token * tokens * tokens))


def _count_busy(probabilities: Tensor, per_token: int, layer: int, balance: Balance) -> None:
    """Add a microbatch to the step's sums, and set the mean over the microbatches so far."""
    step = balance.step
    busy = _busy(probabilities, per_token)
    for group in step.groups:
        comm.all_reduce(busy, group)
    before, passes = step.busy.get(layer, (torch.zeros_like(busy), 0))
    total = before + busy
    step.busy[layer] = total, passes + 1
    balance.mean_busy[layer] = total / (passes + 1)


def _busy(probabilities: Tensor, per_token: int) -> Tensor:
    """Return float32 [experts]: the number of tokens whose best scores include the expert. Not differentiable."""
    best = probabilities.detach().topk(per_token, -1).indices
    return count_rows(best, probabilities.shape[-1]).to(probabilities.dtype)


def of_logits(logits: Tensor, groups: Sequence[comm.Group]) -> Tensor:
    """Return z without c. The loss is the sum over the ranks of all groups."""
    return torch.logsumexp(logits.float(), -1).square().mean() / math.prod(
        comm.size(group) for group in groups
    )
