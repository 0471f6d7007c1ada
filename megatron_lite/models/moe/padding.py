"""Rows of tokens for experts that all have the same number of rows. The host knows this number before the router runs.

An expert with fewer tokens gets rows of zeros. Their outputs go to no token, and their gradients are zero. Rows are sorted
by expert and by token, as without padding. So the products of all other rows are the same.

The index after the last one stands for nothing: in `token` for padding, in `place` for a dropped choice.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.models.moe.counting import count_rows


@dataclass(frozen=True)
class PaddedCopies:
    """The rows of all tokens, in the order of their experts, with padding. The interface is that of copies.Copies."""

    slot: Tensor
    """int64 [rows]: the choice of each row, token * k + the number of the choice; any choice for padding."""
    token: Tensor
    """int64 [rows]: the token of each row."""
    place: Tensor
    """int64 [tokens, k]: the row of each choice."""

    def of(self, x: Tensor) -> Tensor:
        """x [tokens, width] -> [rows, width]."""
        made: Tensor = _Copied.apply(x, self.token, self.place)  # type: ignore[no-untyped-call]
        return made

    def weights(self, weights: Tensor) -> Tensor:
        """weights [tokens, k] -> [rows, 1]. Rows of padding have any weight; it gets a gradient of zero."""
        return weights.flatten().index_select(0, self.slot).unsqueeze(1)

    def summed(self, rows: Tensor, like: Tensor) -> Tensor:
        """rows [rows, width] -> [tokens, width]. like: a tensor of the result's shape."""
        del like
        made: Tensor = _Summed.apply(rows, self.token, self.place)  # type: ignore[no-untyped-call]
        return made


def padded_copies(chosen: Tensor, experts: int, capacity: int) -> PaddedCopies:
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
    return PaddedCopies(slot, choice // per_token, place[:choices].view(-1, per_token))


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """x [n, width], index int64 [m], 0 <= index <= n -> [m, width]. Index n gives zeros."""
    with_zeros = torch.cat((x, x.new_zeros(1, x.shape[1])))
    return with_zeros.index_select(0, index)


def _sum(rows: Tensor, place: Tensor) -> Tensor:
    """rows [rows, width], place int64 [tokens, k] -> [tokens, width]: the sum over each token's rows."""
    tokens, per_token = place.shape
    return _gathered(rows, place.flatten()).view(tokens, per_token, -1).sum(1)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return _gathered(x, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return _sum(grad, place), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return _sum(rows, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return _gathered(grad, token), None, None
