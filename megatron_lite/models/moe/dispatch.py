"""How tokens get to their experts on other ranks and back: no token is dropped, so that sizes are exchanged first.

On the way there rows are sorted by expert; what arrives is sorted by expert again, whatever rank it came from.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel import comm


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
class Route:
    """Of the tokens of one layer and microbatch."""

    token: Tensor
    """int64 [rows], at most tokens * k: whose row is sent, sorted by expert; a token's rows to several experts are in their order."""
    slot: Tensor
    """int64 [rows]: where its weight stands in weights.flatten()."""
    group: ProcessGroup | None
    sent: list[int]
    received: list[int]
    """Rows by rank."""
    arrival: Tensor | None
    """int64: which of the received rows comes where, sorted by expert; None where they are sorted."""
    counts: list[int]
    """Rows of each of this rank's experts."""

    def there(self, x: Tensor) -> Tensor:
        """Rows as they leave -> as this rank's experts take them."""
        if self.group is not None:
            x = _Exchange.apply(x, self.group, self.sent, self.received)  # type: ignore[no-untyped-call]
        return x if self.arrival is None else x[self.arrival]

    def back(self, y: Tensor) -> Tensor:
        """The other way."""
        if self.arrival is not None:
            y = y[self.arrival.argsort()]
        if self.group is not None:
            y = _Exchange.apply(y, self.group, self.received, self.sent)  # type: ignore[no-untyped-call]
        return y


@torch.compiler.disable  # type: ignore[untyped-decorator]
def route(chosen: Tensor, experts: int, group: ProcessGroup | None) -> Route:
    """chosen int64 [tokens, k]; the number of experts in place of one that has no room.

    group: the ranks that share the experts, in whose order these are counted. Collective over it.
    """
    flat = chosen.flatten()
    slot = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    numbers = counts.tolist()
    slot = slot[: sum(numbers)]  # those without room come last
    token = slot // chosen.shape[1]
    if group is None:
        return Route(token, slot, None, [], [], None, numbers)
    ranks = comm.size(group)
    theirs = comm.exchange(counts, group, [experts // ranks] * ranks, [experts // ranks] * ranks).view(ranks, -1)
    sent, received = counts.view(ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
    own = torch.arange(theirs.shape[1], device=chosen.device).repeat(ranks)
    arrival = own.repeat_interleave(theirs.flatten()).argsort(stable=True)
    return Route(token, slot, group, sent, received, arrival, theirs.sum(0).tolist())
