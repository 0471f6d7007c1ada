"""The collectives by the names that this torch has for them, and those that autograd knows. A group of None is one rank.

All sums are in the dtype of the tensor. A failed collective raises and leaves its group unusable: nobody catches it here.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

Group = ProcessGroup | None

# torch 2.13 renamed these two and warns about the older names.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def all_reduce(tensor: Tensor, group: Group, *, later: bool = False) -> Work | None:
    """Sum in place. later: returns at once; wait() on the result before touching the tensor."""
    return None if group is None else dist.all_reduce(tensor, group=group, async_op=later)


def largest(tensor: Tensor, group: Group) -> None:
    """Each element becomes the largest of all ranks."""
    if group is not None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


def reduce_scatter(part: Tensor, whole: Tensor, group: Group, *, later: bool = False) -> Work | None:
    """part, which may lie in whole, becomes this rank's 1/n of the sum."""
    if group is None:
        return None
    work: Work | None = _reduce_scatter(part, whole, group=group, async_op=later)
    return work


def all_gather(whole: Tensor, part: Tensor, group: Group, *, later: bool = False) -> Work | None:
    """whole becomes all ranks' parts one after another; part may lie in whole."""
    if group is None:
        return None
    work: Work | None = _all_gather(whole, part, group=group, async_op=later)
    return work


class Works:
    """Several, as one to wait for."""

    def __init__(self, works: Sequence[Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            wait(work)


def reduce_to_owners(whole: Tensor, bounds: Sequence[int], group: Group) -> Works:
    """Start to sum the elements [bounds[r], bounds[r + 1]) on rank r; on the others they are lost."""
    return Works([
        dist.reduce(whole[start:end], dist.get_global_rank(group, rank), group=group, async_op=True)
        for rank, (start, end) in enumerate(pairwise(bounds))
        if group is not None and start < end
    ])  # fmt: skip


def gather_from_owners(whole: Tensor, bounds: Sequence[int], group: Group) -> Works:
    """Start to fetch the elements [bounds[r], bounds[r + 1]) from rank r."""
    return Works([
        dist.broadcast(whole[start:end], dist.get_global_rank(group, rank), group=group, async_op=True)
        for rank, (start, end) in enumerate(pairwise(bounds))
        if group is not None and start < end
    ])  # fmt: skip


def broadcast(tensor: Tensor, source: int, group: Group) -> None:
    """tensor becomes that of a global rank."""
    if group is not None:
        dist.broadcast(tensor, source, group=group)


PIECE = 1 << 24
"""Elements that are passed on at one time: a backend may keep a copy of as many."""


def pass_on(tensor: Tensor, source: int, group: Group) -> None:
    """tensor, contiguous, becomes that of this rank of the group, piece by piece."""
    if group is not None:
        for piece in torch.split(tensor.view(-1), PIECE):
            dist.broadcast(piece, dist.get_global_rank(group, source), group=group)


def exchange(rows: Tensor, group: ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Runs of so many rows to each rank, one after the other, and theirs in the order of ranks."""
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), list(received), list(sent), group=group)
    return found


def send(tensor: Tensor, rank: int, group: Group, tag: int) -> Work:
    """To a global rank; the tensor stays as it is until wait()."""
    work = dist.isend(tensor, rank, group=group, tag=tag)
    assert work is not None, "this rank is in the group"
    return work


def receive(tensor: Tensor, rank: int, group: Group, tag: int) -> Work:
    work = dist.irecv(tensor, rank, group=group, tag=tag)
    assert work is not None, "this rank is in the group"
    return work


def shift(tensor: Tensor, group: ProcessGroup, *, tag: int = 0) -> Callable[[], Tensor]:
    """Start to send it to the next rank of a ring; the result waits, and gives what the one before sent. Keep the tensor until then."""
    here, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    coming = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, ranks[(here + 1) % len(ranks)], group, tag),
        dist.P2POp(dist.irecv, coming, ranks[here - 1], group, tag),
    ]
    works = dist.batch_isend_irecv(operations)

    def arrived() -> Tensor:
        for work in works:
            work.wait()
        return coming

    return arrived


def overlapping() -> bool:
    """Whether a Function may start a collective and wait later: torch.compile can't trace that."""
    return not torch.compiler.is_compiling()


def wait(work: Work | Works | None) -> None:
    if work is not None:
        work.wait()


def gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    """All ranks' parts one after another along the first axis."""
    whole = part.new_empty(part.shape[0] * size(group), *part.shape[1:])
    all_gather(whole, part.contiguous(), group)
    return whole


def scattered(whole: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part, along the first axis, of the sum over all ranks."""
    part = whole.new_empty(whole.shape[0] // size(group), *whole.shape[1:])
    reduce_scatter(part, whole.contiguous(), group)
    return part


class _Sum(torch.autograd.Function):
    """Sum over the ranks; the gradient of a sum is that of each term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        x = x.clone()
        all_reduce(x, group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumScattered(torch.autograd.Function):
    """Sum over the ranks of which each keeps its part of the first axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


class _SharedOver(torch.autograd.Function):
    """What is the same on all ranks, or (gather) their parts one after another; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, gather: bool) -> Tensor:
        ctx.group, ctx.gather = group, gather
        return gathered(x, group) if gather else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.gather:
            return scattered(grad, ctx.group), None, None
        grad = grad.clone()
        all_reduce(grad, ctx.group)
        return grad, None, None


def shared_over(x: Tensor, group: Group, *, gather: bool) -> Tensor:
    """The opposite of sum_over: x, the same on all ranks, or (gather) their parts one after another, for each to use in its own way."""
    if group is None:
        return x
    shared: Tensor = _SharedOver.apply(x, group, gather)  # type: ignore[no-untyped-call]
    return shared


def sum_over(x: Tensor, group: ProcessGroup, *, scatter: bool) -> Tensor:
    """The sum over the ranks, whole or (scatter) sharded along the first axis; autograd knows how to go back."""
    summed: Tensor = (_SumScattered if scatter else _Sum).apply(x, group)  # type: ignore[no-untyped-call]
    return summed
