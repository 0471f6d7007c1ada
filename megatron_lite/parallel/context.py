"""Context parallelism: how the tokens of a sequence are shared out over ranks, and how keys and values get from one to another.

A sequence is cut into 2n blocks of which rank r has r and 2n - 1 - r, so that each rank's queries see equally many keys: Megatron's
cut (get_batch_on_this_cp_rank). Everything that goes with tokens is cut alike.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel import comm


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the tokens of every sequence, and which of them this is."""

    group: ProcessGroup
    rank: int
    size: int
    how: str
    """In which attention brings queries to keys: a word of settings.options.CONTEXT."""
    levels: "tuple[ContextGroup, ContextGroup] | None" = None
    """Of a2a+p2p: the near ranks, which take heads for tokens, and the far ones, which have the same heads then.

    Near ranks are neighbours, whose blocks together are two runs of blocks: those that one of the far ranks would have of as many.
    """

    @property
    def over_heads(self) -> "ContextGroup | None":
        """The ranks that take heads for tokens."""
        return self if self.how == "a2a" else None if self.levels is None else self.levels[0]

    @property
    def over_blocks(self) -> "ContextGroup | None":
        """The ranks that attend to each other's tokens block by block."""
        return None if self.how == "a2a" else self if self.levels is None else self.levels[1]

    def blocks(self, rank: int) -> tuple[int, int]:
        """The two of a rank, in the order in which it has them."""
        return rank, 2 * self.size - 1 - rank

    def position(self, rank: int, place: int, half: int) -> int:
        """Of the token that a rank has at this place. half: tokens of one block."""
        return self.blocks(rank)[place // half] * half + place % half

    def own_part(self, whole: Tensor, axis: int) -> Tensor:
        """This rank's two blocks of something that everybody has all of."""
        parts = whole.chunk(2 * self.size, axis)
        return torch.cat([parts[block] for block in self.blocks(self.rank)], axis)

    def glue(self, parts: Tensor, axis: int) -> Tensor:
        """parts: all ranks', stacked along a leading axis -> the whole; axis is counted without that one."""
        blocks = dict[int, Tensor]()
        for rank, part in enumerate(parts):
            blocks |= dict(zip(self.blocks(rank), part.chunk(2, axis), strict=True))
        return torch.cat([blocks[block] for block in range(2 * self.size)], axis)

    def whole(self, own: Tensor, axis: int) -> Tensor:
        """From every rank's part; the same everywhere, without a gradient."""
        return self.glue(comm.gathered(own.unsqueeze(0), self.group), axis)


class Ring:
    """Keys and values wander from rank to rank, and their gradients after them: there are never more than two ranks' at a time."""

    def __init__(self, own: Tensor, ranks: ContextGroup) -> None:
        """own: this rank's keys and values."""
        self._own, self._ranks = own, ranks
        self.gradient = own
        """float32, of this rank's own, when walk_back has ended."""

    def walk(self) -> Iterator[tuple[int, Tensor]]:
        """(rank, its keys and values), this one's first. The next are on their way meanwhile."""
        ranks, held = self._ranks, self._own.contiguous()
        for step in range(ranks.size):
            last = step == ranks.size - 1
            coming = None if last else comm.shift(held, ranks.group)
            yield (ranks.rank - step) % ranks.size, held
            held = held if coming is None else coming()

    def walk_back(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The same, with the gradient float32 to add to."""
        gradient = torch.zeros_like(self._own, dtype=torch.float32)
        coming: Callable[[], Tensor] | None = None
        for rank, held in self.walk():
            gradient = gradient if coming is None else coming()
            yield rank, held, gradient
            coming = comm.shift(gradient, self._ranks.group, tag=1)
        self.gradient = gradient if coming is None else coming()


class Gathering:
    """All ranks' keys and values at once; gradients are summed at the end."""

    def __init__(self, own: Tensor, ranks: ContextGroup) -> None:
        self._own, self._ranks = own, ranks
        self.gradient = own

    def walk(self) -> Iterator[tuple[int, Tensor]]:
        """As Ring's, in the same order."""
        ranks = self._ranks
        whole = comm.gathered(self._own.unsqueeze(0), ranks.group)
        for step in range(ranks.size):
            rank = (ranks.rank - step) % ranks.size
            yield rank, whole[rank]

    def walk_back(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """As Ring's."""
        whole = self._own.new_zeros(self._ranks.size, *self._own.shape, dtype=torch.float32)
        for rank, held in self.walk():
            yield rank, held, whole[rank]
        self.gradient = comm.scattered(whole, self._ranks.group)[0]


class _HeadsForTokens(torch.autograd.Function):
    """Some heads of all tokens in place of all heads of some tokens; on the way back the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ContextGroup) -> Tensor:
        ctx.ranks = ranks
        return _all_tokens(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_heads(grad, ctx.ranks), None


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: ContextGroup) -> Tensor:
        ctx.ranks = ranks
        return _all_heads(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_tokens(grad, ctx.ranks), None


def heads_for_tokens(x: Tensor, ranks: ContextGroup) -> Tensor:
    """[sequence / n, batch, heads, ...] -> [sequence, batch, heads / n, ...], tokens in their order; autograd goes back."""
    found: Tensor = _HeadsForTokens.apply(x, ranks)  # type: ignore[no-untyped-call]
    return found


def tokens_for_heads(x: Tensor, ranks: ContextGroup) -> Tensor:
    """The other way."""
    found: Tensor = _TokensForHeads.apply(x, ranks)  # type: ignore[no-untyped-call]
    return found


def _all_tokens(x: Tensor, ranks: ContextGroup) -> Tensor:
    split = x.view(*x.shape[:2], ranks.size, -1, *x.shape[3:]).movedim(2, 0)
    return ranks.glue(_exchanged(split, ranks), 0)


def _all_heads(x: Tensor, ranks: ContextGroup) -> Tensor:
    blocks = x.chunk(2 * ranks.size, 0)
    split = torch.stack([torch.cat([blocks[block] for block in ranks.blocks(rank)]) for rank in range(ranks.size)])
    return _exchanged(split, ranks).movedim(0, 2).flatten(2, 3)


def _exchanged(split: Tensor, ranks: ContextGroup) -> Tensor:
    """Of [n, ...] part i to rank i, and what they have for this one."""
    one_each = [1] * ranks.size
    return comm.exchange(split, ranks.group, one_each, one_each)
