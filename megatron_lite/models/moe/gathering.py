"""Dispatch without an exchange: each rank gathers the tokens of all ranks that share a layer's experts.

A rank computes the tokens of its own experts, or of its parts of them. The sum over all ranks returns to the token's
own rank. Unless a token goes to nearly all ranks anyway, this moves more data than dispatch.py. But the sizes are known
before the router runs.
"""

from dataclasses import replace

from torch import Tensor

from megatron_lite.models.build_plan import ExpertRanks
from megatron_lite.models.moe.copies import Copies
from megatron_lite.models.moe.counting import RowNumbers, count_rows
from megatron_lite.models.moe.dispatch import Compute
from megatron_lite.models.moe.padding import padded_copies
from megatron_lite.parallel import comm


def by_gathering(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    count: int,
    ranks: ExpertRanks,
    compute: Compute,
    numbers: RowNumbers,
) -> Tensor:
    """Same interface as dispatch.by_exchange. Every rank of both groups has to have the same number of tokens."""
    groups = [group for group in (ranks.parts, ranks.experts) if group is not None]
    for group in groups:
        x, weights = (comm.shared_over(own, group, gather=True) for own in (x, weights))
        chosen = comm.gathered(chosen, group)
        if numbers.capacity is not None:
            numbers = replace(numbers, capacity=numbers.capacity * comm.size(group))
    copies, counts = _own_rows(chosen, count, ranks, numbers)
    made = compute(copies.of(x), copies.weights(weights), counts)
    mixed = copies.summed(made, x)
    for group in reversed(groups):
        mixed = comm.sum_over(mixed, group, scatter=True)
    return mixed


def _own_rows(
    chosen: Tensor, count: int, ranks: ExpertRanks, numbers: RowNumbers
) -> tuple[Copies, list[int]]:
    """Return the rows of this rank's experts, sorted by expert, and the number of rows of each."""
    here = count // comm.size(ranks.experts)
    first = 0 if ranks.experts is None else here * ranks.experts.rank()
    expert = chosen.flatten() - first
    # True for choices of other ranks' experts, and for dropped choices.
    elsewhere = (expert < 0) | (expert >= here)
    expert = expert.masked_fill(elsewhere, here)
    if numbers.capacity is not None:
        copies = padded_copies(expert.view_as(chosen), here, numbers.capacity)
        return copies, [numbers.capacity] * here
    counts = numbers.read(count_rows(expert, here + 1)[:here])
    # Choices that this rank does not compute have the largest number, so they are sorted to the end.
    slot = expert.argsort(stable=True)[: sum(counts)]
    return Copies(slot, slot // chosen.shape[1], None), counts
