"""Rows of tokens for experts that all have the same number of rows. The host knows this number before the router runs.

An expert with fewer tokens gets rows of zeros. Their outputs go to no token, and their gradients are zero. Rows are sorted
by expert and by token, as without padding. So the products of all other rows are the same.
"""

import torch
from torch import Tensor

from megatron_lite.models.moe.copies import Copies
from megatron_lite.models.moe.counting import count_rows


def padded_copies(chosen: Tensor, experts: int, capacity: int) -> Copies:
    """Return the rows, experts * capacity of them. The host does not wait for the device.

    chosen: int64 [tokens, k]; the value `experts` stands for a choice without a row. No expert may be chosen by more than
    `capacity` tokens.
    """
    flat = chosen.flatten()
    choices = len(flat)
    rows = experts * capacity
    counts = count_rows(flat, experts + 1)[:experts]
    # [choices]: choices sorted by expert, those without a row at the end. An expert's choices begin at `starts`.
    sorted_choices = flat.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    # [experts, capacity]
    number = torch.arange(capacity, device=flat.device)
    places = (starts.unsqueeze(1) + number).clamp_(max=choices - 1)
    is_padding = number >= counts.unsqueeze(1)
    slot = sorted_choices.index_select(0, places.flatten())
    choice = slot.masked_fill(is_padding.flatten(), choices)
    # One more place takes the numbers of all rows of padding.
    place = torch.full((choices + 1,), rows, device=flat.device)
    place[choice] = torch.arange(rows, device=flat.device)
    per_token = chosen.shape[1]
    return Copies(slot, choice // per_token, place[:choices].view(-1, per_token), padded=True)
