"""Context parallelism: divides the tokens of a sequence over ranks, and moves keys and values between the ranks.

A sequence is divided into 2n blocks. Rank r has the blocks r and 2n - 1 - r, so each rank's queries attend to the same
number of keys. This is Megatron's division (get_batch_on_this_cp_rank). Everything with a token axis is divided in the
same way.
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
    """The ranks that share the tokens of every sequence, and this rank among them."""

    group: ProcessGroup
    rank: int
    size: int
    how: str
    """The method by which attention exchanges keys and values: one of settings.options.CONTEXT."""
    levels: "tuple[ContextGroup, ContextGroup] | None" = None
    """For a2a+p2p: (near ranks, far ranks). Near ranks exchange heads for tokens; far ranks then have the same heads.

    Near ranks are neighbours. Their blocks together are two contiguous ranges of blocks. A far rank would have the same
    two ranges if there were only the far ranks.
    """

    @property
    def over_heads(self) -> "ContextGroup | None":
        """The ranks that exchange heads for tokens."""
        if self.how == "a2a":
            return self
        return None if self.levels is None else self.levels[0]

    @property
    def over_blocks(self) -> "ContextGroup | None":
        """The ranks that attend to each other's tokens block by block."""
        if self.how == "a2a":
            return None
        return self if self.levels is None else self.levels[1]

    def blocks(self, rank: int) -> tuple[int, int]:
        """Return the two blocks of a rank, in the order in which the rank holds them."""
        return rank, 2 * self.size - 1 - rank

    def position(self, rank: int, place: int, half: int) -> int:
        """Return the position in the sequence of the token at this place of a rank. half: tokens of one block."""
        return self.blocks(rank)[place // half] * half + place % half

    def own_part(self, whole: Tensor, axis: int) -> Tensor:
        """Return this rank's two blocks of a tensor that every rank holds as a whole."""
        parts = whole.chunk(2 * self.size, axis)
        return torch.cat([parts[block] for block in self.blocks(self.rank)], axis)

    def glue(self, parts: Tensor, axis: int) -> Tensor:
        """Join the parts of all ranks, stacked along a leading axis, to the whole. `axis` does not count the leading axis."""
        blocks = dict[int, Tensor]()
        for rank, part in enumerate(parts):
            blocks |= dict(zip(self.blocks(rank), part.chunk(2, axis), strict=True))
        return torch.cat([blocks[block] for block in range(2 * self.size)], axis)

    def whole(self, own: Tensor, axis: int) -> Tensor:
        """Gather the whole tensor from every rank's part. Not differentiable."""
        return self.glue(comm.gathered(own.unsqueeze(0), self.group), axis)


class Ring:
    """Passes keys and values from rank to rank in a ring, and their gradients after them.

    A rank never holds the keys and values of more than two ranks at a time.
    """

    def __init__(self, own: Tensor, ranks: ContextGroup) -> None:
        """own: this rank's keys and values."""
        self._own, self._ranks = own, ranks
        self.gradient = own
        """float32: the gradient of this rank's keys and values, after walk_back has ended."""

    def walk(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its keys and values), starting with this rank. The next ones arrive meanwhile."""
        ranks, held = self._ranks, self._own.contiguous()
        for step in range(ranks.size):
            last = step == ranks.size - 1
            coming = None if last else comm.shift(held, ranks.group)
            # After `step` shifts, this rank holds the keys and values of the rank `step` places before it.
            yield (ranks.rank - step) % ranks.size, held
            held = held if coming is None else coming()

    def walk_back(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (rank, its keys and values, float32 gradient). The caller adds to the gradient, which is zero.

        The other ranks' gradient of these keys and values arrives while the caller computes.
        """
        coming: Callable[[], Tensor] | None = None
        for rank, held in self.walk():
            gradient = torch.zeros_like(self._own, dtype=torch.float32)
            yield rank, held, gradient
            if coming is not None:
                gradient.add_(coming())
            # Send the sum to the rank that gets these keys and values next.
            coming = comm.shift(gradient, self._ranks.group, tag=1)
        assert coming is not None, "a ring has ranks"
        self.gradient = coming()


class Gathering:
    """Gathers the keys and values of all ranks at once. Gradients are summed at the end."""

    def __init__(self, own: Tensor, ranks: ContextGroup) -> None:
        self._own, self._ranks = own, ranks
        self.gradient = own

    def walk(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the same values as Ring.walk, in the same order."""
        ranks = self._ranks
        whole = comm.gathered(self._own.unsqueeze(0), ranks.group)
        for step in range(ranks.size):
            rank = (ranks.rank - step) % ranks.size
            yield rank, whole[rank]

    def walk_back(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the same values as Ring.walk_back, in the same order."""
        whole = self._own.new_zeros(self._ranks.size, *self._own.shape, dtype=torch.float32)
        for rank, held in self.walk():
            yield rank, held, whole[rank]
        self.gradient = comm.scattered(whole, self._ranks.group)[0]


class _HeadsForTokens(torch.autograd.Function):
    """Exchanges all heads of some tokens for some heads of all tokens; backward, the opposite."""

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
    """[sequence / n, batch, heads, ...] -> [sequence, batch, heads / n, ...], with tokens in sequence order. Differentiable."""
    found: Tensor = _HeadsForTokens.apply(x, ranks)  # type: ignore[no-untyped-call]
    return found


def tokens_for_heads(x: Tensor, ranks: ContextGroup) -> Tensor:
    """[sequence, batch, heads / n, ...] -> [sequence / n, batch, heads, ...]: the inverse of heads_for_tokens."""
    found: Tensor = _TokensForHeads.apply(x, ranks)  # type: ignore[no-untyped-call]
    return found


def _all_tokens(x: Tensor, ranks: ContextGroup) -> Tensor:
    split = x.view(*x.shape[:2], ranks.size, -1, *x.shape[3:]).movedim(2, 0)
    return ranks.glue(_exchanged(split, ranks), 0)


def _all_heads(x: Tensor, ranks: ContextGroup) -> Tensor:
    blocks = x.chunk(2 * ranks.size, 0)
    split = torch.stack(
        [torch.cat([blocks[block] for block in ranks.blocks(rank)]) for rank in range(ranks.size)]
    )
    return _exchanged(split, ranks).movedim(0, 2).flatten(2, 3)


def _exchanged(split: Tensor, ranks: ContextGroup) -> Tensor:
    """Send part i of [n, ...] to rank i, and return the parts that all ranks sent to this rank."""
    one_each = [1] * ranks.size
    return comm.exchange(split, ranks.group, one_each, one_each)
