"""How tokens get to their experts on other ranks and back: no token is dropped, so that sizes are exchanged first.

On the way there rows are sorted by expert and go to the rank that has it; where several ranks have a part of each expert (expert tensor
parallelism), each of them then gives its rows to all of these, and gets back from each what its part has made of them: the
sum is the whole. What arrives is sorted by expert again, whatever rank it came from.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.models.moe.grouped import permuted
from megatron_lite.models.plan import ExpertRanks
from megatron_lite.parallel import comm

Compute = Callable[[Tensor, Tensor, list[int]], Tensor]
"""What experts make of rows [rows, hidden] sorted by expert, with their weights [rows, 1], of whom each has so many."""


class _Exchange(torch.autograd.Function):
    """Runs of rows to all ranks, and theirs here; on the way back the other way round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return comm.exchange(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return comm.exchange(grad, ctx.group, ctx.received, ctx.sent), None, None, None


@dataclass(frozen=True)
class Hop:
    """One exchange among the ranks of a group."""

    group: ProcessGroup
    sent: list[int]
    received: list[int]
    """Rows by rank."""

    def there(self, x: Tensor) -> Tensor:
        moved: Tensor = _Exchange.apply(x, self.group, self.sent, self.received)  # type: ignore[no-untyped-call]
        return moved

    def back(self, y: Tensor) -> Tensor:
        moved: Tensor = _Exchange.apply(y, self.group, self.received, self.sent)  # type: ignore[no-untyped-call]
        return moved


@dataclass(frozen=True)
class Route:
    """Of the tokens of one layer and microbatch."""

    token: Tensor
    """int64 [rows], at most tokens * k: whose row is sent, sorted by expert; a token's rows to several experts are in their order."""
    slot: Tensor
    """int64 [rows]: where its weight stands in weights.flatten()."""
    counts: list[int]
    """Rows of each of this rank's experts."""
    among_experts: Hop | None = None
    """To the ranks that have other experts."""
    among_parts: Hop | None = None
    """To those that have the other parts of the same experts; the same rows to each."""
    arrival: Tensor | None = None
    """int64: which of the received rows comes where, sorted by expert; None where they are sorted."""
    departure: Tensor | None = None
    """The same the other way round."""

    def there(self, x: Tensor) -> Tensor:
        """Rows as they leave -> as this rank's experts take them."""
        if self.among_experts is not None:
            x = self.among_experts.there(x)
        if self.among_parts is not None:
            x = self.among_parts.there(x.repeat(len(self.among_parts.sent), 1))
        return x if self.arrival is None or self.departure is None else permuted(x, self.arrival, self.departure)

    def back(self, y: Tensor) -> Tensor:
        """The other way: what experts, or parts of them, have made of these rows -> the sums over the parts."""
        if self.arrival is not None and self.departure is not None:
            y = permuted(y, self.departure, self.arrival)
        if self.among_parts is not None:
            sent = self.among_parts.sent
            y = self.among_parts.back(y).view(len(sent), sent[0], -1).sum(0) if sent[0] else y[:0]
        return y if self.among_experts is None else self.among_experts.back(y)


def by_exchange(x: Tensor, weights: Tensor, chosen: Tensor, count: int, ranks: ExpertRanks, compute: Compute) -> Tensor:
    """x [tokens, hidden], weights [tokens, k], chosen int64 [tokens, k] of so many experts -> [tokens, hidden]. Collective."""
    way = route(chosen, count, ranks)
    rows, scaled = (
        way.there(x.index_select(0, way.token)),
        way.there(weights.flatten().index_select(0, way.slot).unsqueeze(1)),
    )
    made = way.back(compute(rows, scaled, way.counts))
    return torch.zeros_like(x).index_add(0, way.token, made)


def route(chosen: Tensor, experts: int, ranks: ExpertRanks) -> Route:
    """chosen int64 [tokens, k]; the number of experts in place of one that has no room. Collective over both groups."""
    flat = chosen.flatten()
    slot = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    sharing, parts = comm.size(ranks.experts), comm.size(ranks.parts)
    here = experts // sharing
    # Rows by the rank that they come from and by expert: [sharing, here], then of all parts' ranks one after another.
    coming = counts.view(sharing, here)
    if ranks.experts is not None:
        coming = comm.exchange(counts, ranks.experts, [here] * sharing, [here] * sharing).view(sharing, here)
    arriving = coming if ranks.parts is None else comm.gathered(coming, ranks.parts)
    numbers = torch.cat((counts, arriving.flatten())).tolist()  # the one wait for a GPU
    sent, of_each = numbers[:experts], numbers[experts:]
    slot = slot[: sum(sent)]  # those without room come last
    found = Route(slot // chosen.shape[1], slot, [sum(of_each[expert::here]) for expert in range(here)])
    if sharing * parts == 1:
        return found
    expert = torch.arange(here, device=chosen.device).repeat(sharing * parts)
    arrival = expert.repeat_interleave(arriving.flatten()).argsort(stable=True)
    by_part = _sums(of_each, experts)
    mine = 0 if ranks.parts is None else ranks.parts.rank()
    from_ranks = _sums(of_each[mine * experts : (mine + 1) * experts], here)
    among_experts = None if ranks.experts is None else Hop(ranks.experts, _sums(sent, here), from_ranks)
    among_parts = None if ranks.parts is None else Hop(ranks.parts, [by_part[mine]] * parts, by_part)
    return replace(
        found, among_experts=among_experts, among_parts=among_parts, arrival=arrival, departure=arrival.argsort()
    )


def _sums(numbers: list[int], run: int) -> list[int]:
    """Of each run of so many."""
    return [sum(numbers[first : first + run]) for first in range(0, len(numbers), run)]
