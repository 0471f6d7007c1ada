"""Collectives, independent of the torch version, and differentiable collectives. A group of None means a single rank.

All sums are in the dtype of the tensor. A failed collective raises and leaves its group unusable; this module catches
nothing.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megatron_lite.processes.calls import CALLS, message_key

Group = ProcessGroup | None

# torch 2.13 renamed these two and warns about the older names.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def size(group: Group) -> int:
    """Return the number of ranks."""
    return 1 if group is None else dist.get_world_size(group)


class Call:
    """A counted call of a group that has begun."""

    def __init__(self, work: Work | None, key: str, number: int) -> None:
        self._works = [] if work is None else [work]
        self._key, self._number = key, number

    def add(self, work: Work | None) -> None:
        """Add an operation that belongs to the call."""
        if work is not None:
            self._works.append(work)

    def wait(self) -> None:
        """Wait until the result can be used."""
        CALLS.await_call(self._key, self._number)
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _begin(group: ProcessGroup, *, later: bool = False) -> Call | None:
    """Count a collective. Returns its Call if the caller waits later; else the collective itself waits.

    torch.compile can't trace the counters. Compiled calls are uncounted on all ranks alike.
    """
    if torch.compiler.is_compiling():
        return None
    key = group.group_name
    number = CALLS.begin(key)
    if not later:
        CALLS.await_call(key, number)
    return Call(None, key, number) if later else None


def _begun(call: Call | None, work: Work | None) -> Call | None:
    """Return the call with its operation."""
    if call is not None:
        call.add(work)
    return call


def all_reduce(tensor: Tensor, group: Group, *, later: bool = False) -> Call | None:
    """Sum in place. later: return at once; call wait() on the result before you use the tensor."""
    if group is None:
        return None
    call = _begin(group, later=later)
    return _begun(call, dist.all_reduce(tensor, group=group, async_op=later))


def largest(tensor: Tensor, group: Group) -> None:
    """Replace each element by its maximum over the ranks."""
    if group is not None:
        _begin(group)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


def reduce_scatter(
    part: Tensor, whole: Tensor, group: Group, *, later: bool = False
) -> Call | None:
    """Set `part` to this rank's 1/n of the sum. `part` may be a view of `whole`."""
    if group is None:
        return None
    call = _begin(group, later=later)
    return _begun(call, _reduce_scatter(part, whole, group=group, async_op=later))


def all_gather(whole: Tensor, part: Tensor, group: Group, *, later: bool = False) -> Call | None:
    """Set `whole` to the concatenated parts of all ranks. `part` may be a view of `whole`."""
    if group is None:
        return None
    call = _begin(group, later=later)
    return _begun(call, _all_gather(whole, part, group=group, async_op=later))


class Works:
    """Several operations with one wait()."""

    def __init__(self, works: Sequence[Call | None]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            wait(work)


def reduce_to_owners(whole: Tensor, bounds: Sequence[int], group: Group) -> Works:
    """Start to sum elements [bounds[r], bounds[r + 1]) on rank r. On other ranks, these elements become undefined."""
    if group is None:
        return Works(())
    works = []
    for rank, part in _parts(whole, bounds):
        owner = dist.get_global_rank(group, rank)
        call = _begin(group, later=True)
        works.append(_begun(call, dist.reduce(part, owner, group=group, async_op=True)))
    return Works(works)


def gather_from_owners(whole: Tensor, bounds: Sequence[int], group: Group) -> Works:
    """Start to fetch elements [bounds[r], bounds[r + 1]) from rank r."""
    if group is None:
        return Works(())
    works = []
    for rank, part in _parts(whole, bounds):
        owner = dist.get_global_rank(group, rank)
        call = _begin(group, later=True)
        works.append(_begun(call, dist.broadcast(part, owner, group=group, async_op=True)))
    return Works(works)


def _parts(whole: Tensor, bounds: Sequence[int]) -> list[tuple[int, Tensor]]:
    """Return (rank, elements [bounds[rank], bounds[rank + 1])) of each rank that owns some."""
    return [
        (rank, whole[start:end])
        for rank, (start, end) in enumerate(pairwise(bounds))
        if start < end
    ]


def broadcast(tensor: Tensor, source: int, group: Group) -> None:
    """Broadcast from the given global rank, in place."""
    if group is not None:
        _begin(group)
        dist.broadcast(tensor, source, group=group)


PIECE = 1 << 24
"""Elements per broadcast. A backend may copy that many elements."""


def pass_on(tensor: Tensor, source: int, group: Group) -> None:
    """Broadcast a contiguous tensor from the given rank of the group, in pieces and in place."""
    if group is not None:
        for piece in torch.split(tensor.view(-1), PIECE):
            _begin(group)
            dist.broadcast(piece, dist.get_global_rank(group, source), group=group)


def exchange(
    rows: Tensor, group: ProcessGroup, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    """Send `sent[r]` rows to each rank r, and return the `received[r]` rows of each rank, in the order of ranks."""
    found = rows.new_empty(sum(received), *rows.shape[1:])
    _begin(group)
    dist.all_to_all_single(found, rows.contiguous(), list(received), list(sent), group=group)
    return found


def send(tensor: Tensor, rank: int, group: Group, tag: int) -> Call:
    """Start to send to a global rank. Don't change the tensor before wait()."""
    call = _begin_message(group, dist.get_rank(), rank)
    call.add(dist.isend(tensor, rank, group=group, tag=tag))
    return call


def receive(tensor: Tensor, rank: int, group: Group, tag: int) -> Call:
    """Start to receive from a global rank. The tensor is complete after wait()."""
    call = _begin_message(group, rank, dist.get_rank())
    call.add(dist.irecv(tensor, rank, group=group, tag=tag))
    return call


def _begin_message(group: Group, source: int, target: int) -> Call:
    """Count a message."""
    key = message_key("" if group is None else group.group_name, source, target)
    return Call(None, key, CALLS.begin(key))


def shift(tensor: Tensor, group: ProcessGroup, *, tag: int = 0) -> Callable[[], Tensor]:
    """Start to send a tensor to the next rank of a ring. Don't change it until you call the result.

    Returns a function that waits and returns the tensor of the previous rank. It keeps the sent tensor until then: a
    message on a GPU may still read its memory when the caller has no more use for it.
    """
    here, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    coming = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, ranks[(here + 1) % len(ranks)], group, tag),
        dist.P2POp(dist.irecv, coming, ranks[here - 1], group, tag),
    ]
    call = _begin(group, later=True)
    works = dist.batch_isend_irecv(operations)

    def arrived() -> Tensor:
        wait(call)
        for work in works:
            work.wait()
        operations.clear()
        return coming

    return arrived


def overlapping() -> bool:
    """Return whether a Function may start a collective and wait later. torch.compile can't trace that."""
    return not torch.compiler.is_compiling()


def wait(work: Call | Works | None) -> None:
    if work is not None:
        work.wait()


def gathered(part: Tensor, group: ProcessGroup) -> Tensor:
    """Return the parts of all ranks, concatenated along the first axis. Not differentiable."""
    whole = part.new_empty(part.shape[0] * size(group), *part.shape[1:])
    all_gather(whole, part.contiguous(), group)
    return whole


def scattered(whole: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's part, along the first axis, of the sum over all ranks. Not differentiable."""
    part = whole.new_empty(whole.shape[0] // size(group), *whole.shape[1:])
    reduce_scatter(part, whole.contiguous(), group)
    return part


class _Sum(torch.autograd.Function):
    """Sum over the ranks. The gradient of a sum is the gradient of each term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        x = x.clone()
        all_reduce(x, group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumScattered(torch.autograd.Function):
    """Sum over the ranks. Each rank keeps its part of the first axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


class _SharedOver(torch.autograd.Function):
    """A tensor that is equal on all ranks, or (gather) the ranks' concatenated parts. Its gradient is summed over the ranks."""

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
    """Return x for use by each rank separately; the inverse of sum_over.

    x is equal on all ranks, or (gather) the ranks' parts are concatenated. The gradient is summed over the ranks.
    """
    if group is None:
        return x
    shared: Tensor = _SharedOver.apply(x, group, gather)  # type: ignore[no-untyped-call]
    return shared


def sum_over(x: Tensor, group: ProcessGroup, *, scatter: bool) -> Tensor:
    """Return the sum over the ranks: whole, or (scatter) sharded along the first axis. Differentiable."""
    summed: Tensor = (_SumScattered if scatter else _Sum).apply(x, group)  # type: ignore[no-untyped-call]
    return summed
