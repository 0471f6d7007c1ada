"""Tokens to their experts without an exchange: each rank sees the tokens of all ranks that share a layer's experts.

It takes those of its own experts (or of its parts of these); the sum of what all ranks make of a token comes back to the rank that the
token is of. More travels than in dispatch.py unless a token goes to nearly all ranks anyway, but in sizes that are known before the
router has spoken.
"""

import torch
from torch import Tensor

from megatron_lite.models.moe.dispatch import Compute
from megatron_lite.models.plan import ExpertRanks
from megatron_lite.parallel import comm


def by_gathering(
    x: Tensor, weights: Tensor, chosen: Tensor, count: int, ranks: ExpertRanks, compute: Compute
) -> Tensor:
    """As dispatch.by_exchange; every rank of both groups has as many tokens."""
    groups = [group for group in (ranks.parts, ranks.experts) if group is not None]
    for group in groups:
        x, weights = (comm.shared_over(own, group, gather=True) for own in (x, weights))
        chosen = comm.gathered(chosen, group)
    here = count // comm.size(ranks.experts)
    first = 0 if ranks.experts is None else here * ranks.experts.rank()
    expert = chosen.flatten() - first
    expert = expert.masked_fill((expert < 0) | (expert >= here), here)  # others', and those without room
    counts: list[int] = torch.bincount(expert, minlength=here + 1)[:here].tolist()  # the one wait for a GPU
    slot = expert.argsort(stable=True)[: sum(counts)]
    token = slot // chosen.shape[1]
    made = compute(x.index_select(0, token), weights.flatten().index_select(0, slot).unsqueeze(1), counts)
    mixed = torch.zeros_like(x).index_add(0, token, made)
    for group in reversed(groups):
        mixed = comm.sum_over(mixed, group, scatter=True)
    return mixed
