"""Dispatch without an exchange: each rank gathers the tokens of all ranks that share a layer's experts.

A rank computes the tokens of its own experts, or of its parts of them. The sum over all ranks returns to the token's
own rank. Unless a token goes to nearly all ranks anyway, this moves more data than dispatch.py. But the sizes are known
before the router runs.
"""

import torch
from torch import Tensor

from megatron_lite.models.build_plan import ExpertRanks
from megatron_lite.models.moe.counting import ReadRows, count_rows
from megatron_lite.models.moe.dispatch import Compute
from megatron_lite.parallel import comm


def by_gathering(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    count: int,
    ranks: ExpertRanks,
    compute: Compute,
    read_rows: ReadRows = Tensor.tolist,
) -> Tensor:
    """Same interface as dispatch.by_exchange. Every rank of both groups has to have the same number of tokens."""
    groups = [group for group in (ranks.parts, ranks.experts) if group is not None]
    for group in groups:
        x, weights = (comm.shared_over(own, group, gather=True) for own in (x, weights))
        chosen = comm.gathered(chosen, group)
    token, slot, counts = _own_rows(chosen, count, ranks, read_rows)
    rows = x.index_select(0, token)
    weight = weights.flatten().index_select(0, slot)
    made = compute(rows, weight.unsqueeze(1), counts)
    mixed = torch.zeros_like(x).index_add(0, token, made)
    for group in reversed(groups):
        mixed = comm.sum_over(mixed, group, scatter=True)
    return mixed


def _own_rows(
    chosen: Tensor, count: int, ranks: ExpertRanks, read_rows: ReadRows
) -> tuple[Tensor, Tensor, list[int]]:
    """Return (token, index in weights.flatten()) of each row of this rank's experts, sorted by expert, and rows of each."""
    here = count // comm.size(ranks.experts)
    first = 0 if ranks.experts is None else here * ranks.experts.rank()
    expert = chosen.flatten() - first
    # True for choices of other ranks' experts, and for dropped choices.
    elsewhere = (expert < 0) | (expert >= here)
    expert = expert.masked_fill(elsewhere, here)
    counts = read_rows(count_rows(expert, here + 1)[:here])
    # Choices that this rank does not compute have the largest number, so they are sorted to the end.
    slot = expert.argsort(stable=True)[: sum(counts)]
    return slot // chosen.shape[1], slot, counts
