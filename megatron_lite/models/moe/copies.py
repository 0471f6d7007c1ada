"""Copies of tokens for their experts, and sums of the experts' outputs. Each is the other's backward pass.

On a GPU, index_add takes five times as long as it takes to move its bytes, and adds in no fixed order. If no choice was
dropped, each token has k rows there. Then the sum gathers them, in the order of the token's choices. So it does where the
experts are padded (padding.py): a dropped choice then gathers a row of zeros.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Copies:
    """The rows of all tokens, in the order of their experts."""

    slot: Tensor
    """int64 [rows]: the choice of each row, token * k + the number of the choice; any choice for a row of padding."""
    token: Tensor
    """int64 [rows]: the token of each row; the number of tokens for a row of padding."""
    place: Tensor | None
    """int64 [tokens, k]: the row of each choice, or the number of rows for a dropped one; None if the rows are added one
    after the other."""
    padded: bool = False
    """True if there may be rows of padding and dropped choices in `place`."""

    def of(self, x: Tensor) -> Tensor:
        """x [tokens, width] -> [rows, width]. Padding is zeros."""
        if self.place is None:
            return x.index_select(0, self.token)
        made: Tensor = _Copied.apply(x, self.token, self.place, self.padded)  # type: ignore[no-untyped-call]
        return made

    def weights(self, weights: Tensor) -> Tensor:
        """weights [tokens, k] -> [rows, 1]. Rows of padding have any weight; it gets a gradient of zero."""
        return weights.flatten().index_select(0, self.slot).unsqueeze(1)

    def summed(self, rows: Tensor, like: Tensor) -> Tensor:
        """rows [rows, width] -> [tokens, width]. like: a tensor of the result's shape."""
        if self.place is None:
            return torch.zeros_like(like).index_add(0, self.token, rows)
        made: Tensor = _Summed.apply(rows, self.token, self.place, self.padded)  # type: ignore[no-untyped-call]
        return made


def copies_of(slot: Tensor, per_token: int, slots: int) -> Copies:
    """slot: int64 [rows], token * per_token + the number of the choice. slots: tokens * per_token."""
    token = slot // per_token
    if not slot.is_cuda or len(slot) < slots:
        return Copies(slot, token, None)
    place = torch.empty_like(slot)
    place[slot] = torch.arange(slots, device=slot.device)
    return Copies(slot, token, place.view(-1, per_token))


def _gathered(x: Tensor, index: Tensor, padded: bool) -> Tensor:
    """x [n, width], index int64 [m] -> [m, width]. padded: whether index n may occur, which gives zeros."""
    if padded:
        x = torch.cat((x, x.new_zeros(1, x.shape[1])))
    return x.index_select(0, index)


def _sum(rows: Tensor, place: Tensor, padded: bool) -> Tensor:
    """rows [rows, width], place int64 [tokens, k] -> [tokens, width]: the sum over each token's rows."""
    tokens, per_token = place.shape
    return _gathered(rows, place.flatten(), padded).view(tokens, per_token, -1).sum(1)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(place)
        ctx.padded = padded
        return _gathered(x, token, padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        return _sum(grad, place, ctx.padded), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, place: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(token)
        ctx.padded = padded
        return _sum(rows, place, padded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (token,) = ctx.saved_tensors
        return _gathered(grad, token, ctx.padded), None, None, None
