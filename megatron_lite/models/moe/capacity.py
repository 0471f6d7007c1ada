"""The capacity limit of experts. An expert drops the tokens beyond it; these tokens skip the expert unchanged.

The result depends on the layout: under sequence parallelism each tensor rank drops among its own tokens.
Source: apply_router_token_dropping of megatron/core/transformer/moe/moe_utils.py. Its padding up to the capacity
changes no result. padding.py pads, so that the numbers of rows are known on the host.
"""

import torch
from torch import Tensor

from megaconv.planning.capacity import capacity_of


def taken(weights: Tensor, chosen: Tensor, experts: int, factor: float, policy: str) -> Tensor:
    """Return bool [tokens, k]: the choices that stay. weights [tokens, k], chosen int64 [tokens, k].

    policy: with `probs`, an expert takes the tokens with the largest weights. With `position`, torch.topk chooses among
    equals.
    """
    tokens, per_token = chosen.shape
    capacity = capacity_of(tokens, per_token, experts, factor)
    if capacity == tokens:
        return torch.ones_like(chosen, dtype=torch.bool)
    if policy == "probs":
        wanted = torch.zeros(tokens, experts, dtype=weights.dtype, device=weights.device)
        wanted.scatter_(1, chosen, weights.detach())
    else:
        wanted = torch.zeros(tokens, experts, dtype=torch.int32, device=weights.device).scatter_(
            1, chosen, 1
        )
    best = wanted.topk(capacity, 0, sorted=False).indices
    return torch.zeros_like(wanted, dtype=torch.bool).scatter_(0, best, True).gather(1, chosen)
