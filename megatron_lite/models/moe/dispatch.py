"""Exchanges tokens with the ranks of their experts. Ranks first exchange the numbers of rows, unless all experts are padded.

Rows are sorted by expert and sent to the expert's rank. With expert tensor parallelism, several ranks hold a part of
each expert. The receiving rank then passes its rows to all of them and sums the outputs of the parts. Received rows are
sorted by expert again, whatever rank sent them.

With padding, each rank sends the same number of rows to each expert. All sizes are then known before the router runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.models.build_plan import ExpertRanks
from megatron_lite.models.moe.copies import Copies, copies_of
from megatron_lite.models.moe.counting import RowNumbers, count_rows
from megatron_lite.models.moe.grouped import permuted
from megatron_lite.models.moe.padding import padded_copies
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


class Order(Protocol):
    """The order of the rows of this rank's experts."""

    def there(self, x: Tensor) -> Tensor:
        """Sort received rows by expert."""

    def back(self, y: Tensor) -> Tensor:
        """Return the order in which the rows were received."""


@dataclass(frozen=True)
class SortedOrder:
    """The order of experts with any numbers of rows."""

    arrival: Tensor
    """int64 [rows]: the order that sorts the received rows by expert."""
    departure: Tensor
    """The inverse of `arrival`."""

    def there(self, x: Tensor) -> Tensor:
        return permuted(x, self.arrival, self.departure)

    def back(self, y: Tensor) -> Tensor:
        return permuted(y, self.departure, self.arrival)


@dataclass(frozen=True)
class EqualOrder:
    """The order of experts that all get the same number of rows from each rank: two axes change places."""

    sources: int
    """Number of ranks that rows come from."""
    experts: int
    """Number of this rank's experts."""

    def there(self, x: Tensor) -> Tensor:
        return _exchanged(x, self.sources, self.experts)

    def back(self, y: Tensor) -> Tensor:
        return _exchanged(y, self.experts, self.sources)


def _exchanged(x: Tensor, first: int, second: int) -> Tensor:
    """[first * second * rows, width] -> [second * first * rows, width]."""
    return x.view(first, second, -1, x.shape[-1]).transpose(0, 1).flatten(0, 2)


@dataclass(frozen=True)
class Route:
    """The route of the tokens of one layer and microbatch."""

    copies: Copies
    """The rows of tokens. Rows are sorted by expert, so a token's rows are too."""
    counts: list[int]
    """Number of rows of each of this rank's experts."""
    among_experts: Hop | None = None
    """The exchange with the ranks that have other experts."""
    among_parts: Hop | None = None
    """The exchange with the ranks that have the other parts of the same experts. Each gets the same rows."""
    order: Order | None = None
    """None if received rows are sorted by expert."""

    def there(self, x: Tensor) -> Tensor:
        """Send the rows of this rank's tokens. Returns the rows for this rank's experts."""
        if self.among_experts is not None:
            x = self.among_experts.there(x)
        if self.among_parts is not None:
            x = self.among_parts.there(x.repeat(len(self.among_parts.sent), 1))
        return x if self.order is None else self.order.there(x)

    def back(self, y: Tensor) -> Tensor:
        """Send the outputs of experts, or of their parts, back. Returns the sums over the parts for this rank's rows."""
        if self.order is not None:
            y = self.order.back(y)
        if self.among_parts is not None:
            ranks, rows = len(self.among_parts.sent), self.among_parts.sent[0]
            # Collective, also for a rank without rows: others may have some.
            y = self.among_parts.back(y).view(ranks, rows, y.shape[-1]).sum(0)
        return y if self.among_experts is None else self.among_experts.back(y)


def by_exchange(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    count: int,
    ranks: ExpertRanks,
    compute: Compute,
    numbers: RowNumbers,
) -> Tensor:
    """x [tokens, hidden], weights [tokens, k], chosen int64 [tokens, k], number of experts -> [tokens, hidden]. Collective."""
    way = route(chosen, count, ranks, numbers)
    rows = way.there(way.copies.of(x))
    scaled = way.there(way.copies.weights(weights))
    made = way.back(compute(rows, scaled, way.counts))
    return way.copies.summed(made, x)


def route(chosen: Tensor, experts: int, ranks: ExpertRanks, numbers: RowNumbers) -> Route:
    """Return the route. Collective over both groups.

    chosen: int64 [tokens, k]; the value `experts` stands for a choice that was dropped.
    """
    if numbers.capacity is not None:
        return _padded_route(chosen, experts, ranks, numbers.capacity)
    flat = chosen.flatten()
    # The last bin, which is left out, counts dropped choices.
    counts = count_rows(flat, experts + 1)[:experts]
    arriving = _arriving(counts, ranks)
    read = numbers.read(torch.cat((counts, arriving)))
    sent, arrived = read[:experts], read[experts:]
    slot = flat.argsort(stable=True)[: sum(sent)]  # dropped choices are sorted to the end
    copies = copies_of(slot, chosen.shape[1], len(flat))
    here = experts // comm.size(ranks.experts)
    rows_of_each = [sum(arrived[expert::here]) for expert in range(here)]
    found = Route(copies, rows_of_each)
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
        order=SortedOrder(arrival, arrival.argsort()),
    )


def _padded_route(chosen: Tensor, experts: int, ranks: ExpertRanks, capacity: int) -> Route:
    """Return the route of experts that each get `capacity` rows from each rank. Nothing is read from the device.

    chosen: as in `route`. Every rank of both groups has to have the same number of tokens.
    """
    copies = padded_copies(chosen, experts, capacity)
    sharing, parts = comm.size(ranks.experts), comm.size(ranks.parts)
    sources = sharing * parts
    here = experts // sharing
    to_each = [here * capacity] * sharing
    to_each_part = [experts * capacity] * parts
    return Route(
        copies,
        counts=[sources * capacity] * here,
        among_experts=None if ranks.experts is None else Hop(ranks.experts, to_each, to_each),
        among_parts=None if ranks.parts is None else Hop(ranks.parts, to_each_part, to_each_part),
        order=None if sources == 1 or here == 1 else EqualOrder(sources, here),
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
