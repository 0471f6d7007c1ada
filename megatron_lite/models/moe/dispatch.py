"""Exchanges tokens with the ranks of their experts. No token is dropped, so ranks first exchange the numbers of rows.

Rows are sorted by expert and sent to the expert's rank. With expert tensor parallelism, several ranks hold a part of
each expert. The receiving rank then passes its rows to all of them and sums the outputs of the parts. Received rows are
sorted by expert again, whatever rank sent them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.models.build_plan import ExpertRanks
from megatron_lite.models.moe.copies import Copies, copies_of
from megatron_lite.models.moe.counting import ReadRows, count_rows
from megatron_lite.models.moe.grouped import permuted
from megatron_lite.parallel import comm

Compute = Callable[[Tensor, Tensor, list[int]], Tensor]
"""Computes experts: (rows [rows, hidden] sorted by expert, weights [rows, 1], rows per expert) -> [rows, hidden]."""


class _Exchange(torch.autograd.Function):
    """Exchanges contiguous rows among all ranks; backward, the opposite exchange."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: ProcessGroup, sent: list[int], received: list[int]
    ) -> Tensor:
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
    """Number of rows for each rank."""

    def there(self, x: Tensor) -> Tensor:
        """Send rows to the ranks of the group."""
        moved: Tensor = _Exchange.apply(x, self.group, self.sent, self.received)  # type: ignore[no-untyped-call]
        return moved

    def back(self, y: Tensor) -> Tensor:
        """Send rows back to the ranks they came from."""
        moved: Tensor = _Exchange.apply(y, self.group, self.received, self.sent)  # type: ignore[no-untyped-call]
        return moved


@dataclass(frozen=True)
class Route:
    """The route of the tokens of one layer and microbatch."""

    copies: Copies
    """The rows of tokens, at most tokens * k. Rows are sorted by expert, so a token's rows are too."""
    slot: Tensor
    """int64 [rows]: the index of each row's weight in weights.flatten()."""
    counts: list[int]
    """Number of rows of each of this rank's experts."""
    among_experts: Hop | None = None
    """The exchange with the ranks that have other experts."""
    among_parts: Hop | None = None
    """The exchange with the ranks that have the other parts of the same experts. Each gets the same rows."""
    arrival: Tensor | None = None
    """int64: the order that sorts the received rows by expert; None if they are sorted."""
    departure: Tensor | None = None
    """The inverse of `arrival`."""

    def there(self, x: Tensor) -> Tensor:
        """Send the rows of this rank's tokens. Returns the rows for this rank's experts."""
        if self.among_experts is not None:
            x = self.among_experts.there(x)
        if self.among_parts is not None:
            x = self.among_parts.there(x.repeat(len(self.among_parts.sent), 1))
        if self.arrival is None or self.departure is None:
            return x
        return permuted(x, self.arrival, self.departure)

    def back(self, y: Tensor) -> Tensor:
        """Send the outputs of experts, or of their parts, back. Returns the sums over the parts for this rank's rows."""
        if self.arrival is not None and self.departure is not None:
            y = permuted(y, self.departure, self.arrival)
        if self.among_parts is not None:
            ranks, rows = len(self.among_parts.sent), self.among_parts.sent[0]
            y = self.among_parts.back(y).view(ranks, rows, -1).sum(0) if rows else y[:0]
        return y if self.among_experts is None else self.among_experts.back(y)


def by_exchange(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    count: int,
    ranks: ExpertRanks,
    compute: Compute,
    read_rows: ReadRows = Tensor.tolist,
) -> Tensor:
    """x [tokens, hidden], weights [tokens, k], chosen int64 [tokens, k], number of experts -> [tokens, hidden]. Collective."""
    way = route(chosen, count, ranks, read_rows)
    rows = way.there(way.copies.of(x))
    scaled = way.there(weights.flatten().index_select(0, way.slot).unsqueeze(1))
    made = way.back(compute(rows, scaled, way.counts))
    return way.copies.summed(made, x)


def route(
    chosen: Tensor, experts: int, ranks: ExpertRanks, read_rows: ReadRows = Tensor.tolist
) -> Route:
    """Return the route. Collective over both groups.

    chosen: int64 [tokens, k]; the value `experts` stands for a choice that was dropped.
    """
    flat = chosen.flatten()
    # The last bin, which is left out, counts dropped choices.
    counts = count_rows(flat, experts + 1)[:experts]
    arriving = _arriving(counts, ranks)
    numbers = read_rows(torch.cat((counts, arriving)))
    sent, arrived = numbers[:experts], numbers[experts:]
    slot = flat.argsort(stable=True)[: sum(sent)]  # dropped choices are sorted to the end
    copies = copies_of(slot, chosen.shape[1], len(flat))
    here = experts // comm.size(ranks.experts)
    rows_of_each = [sum(arrived[expert::here]) for expert in range(here)]
    found = Route(copies, slot, rows_of_each)
    if comm.size(ranks.experts) * comm.size(ranks.parts) == 1:
        return found
    # Rows arrive by source rank, and by expert within a rank. The sort puts rows of one expert together.
    sources = len(arrived) // here
    expert = torch.arange(here, device=chosen.device).repeat(sources)
    # Without `output_size`, repeat_interleave would wait for the device.
    received = expert.repeat_interleave(arriving, output_size=sum(arrived))
    arrival = received.argsort(stable=True)
    among_experts, among_parts = _hops(sent, arrived, ranks)
    return replace(
        found,
        among_experts=among_experts,
        among_parts=among_parts,
        arrival=arrival,
        departure=arrival.argsort(),
    )


def _arriving(counts: Tensor, ranks: ExpertRanks) -> Tensor:
    """Return the rows that come to this rank's experts: [parts * ranks that share the experts * experts of a rank]. Collective.

    counts: rows for each expert of the layer.
    """
    coming = counts
    if ranks.experts is not None:
        sharing = ranks.experts.size()
        each = [len(counts) // sharing] * sharing
        coming = comm.exchange(counts, ranks.experts, each, each)
    return coming if ranks.parts is None else comm.gathered(coming, ranks.parts)


def _hops(sent: list[int], arrived: list[int], ranks: ExpertRanks) -> tuple[Hop | None, Hop | None]:
    """Return the exchanges of a route: among experts, and among parts.

    sent: rows for each expert. arrived: rows by part, source rank and own expert.
    """
    experts = len(sent)
    own_experts = experts // comm.size(ranks.experts)
    by_part = _sums(arrived, experts)
    part = 0 if ranks.parts is None else ranks.parts.rank()
    among_experts = None
    if ranks.experts is not None:
        arrived_here = arrived[part * experts : (part + 1) * experts]
        to_ranks = _sums(sent, own_experts)
        from_ranks = _sums(arrived_here, own_experts)
        among_experts = Hop(ranks.experts, to_ranks, from_ranks)
    among_parts = None
    if ranks.parts is not None:
        # Every other part gets the same rows.
        to_parts = [by_part[part]] * len(by_part)
        among_parts = Hop(ranks.parts, to_parts, by_part)
    return among_experts, among_parts


def _sums(numbers: list[int], run: int) -> list[int]:
    """Return the sum of each `run` consecutive numbers."""
    return [sum(numbers[first : first + run]) for first in range(0, len(numbers), run)]
