"""torch.distributed's calls on the simulated network. Each rank, a thread, has its own groups."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel import comm, grid
from megatron_lite.processes.calls import Calls
from tests.trainer.simulated_nccl.network import (
    Mismatch,
    Network,
    Operation,
    check_same,
    exchange_message,
)


@dataclass(eq=False)
class Group:
    """One rank's group."""

    network: Network
    group_name: str
    ranks: tuple[int, ...]
    own: int
    """This rank's global number."""
    timeout: timedelta | None = None
    backend: str | None = None

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.own)


@dataclass
class Work:
    """A call that has begun."""

    network: Network
    operation: Operation

    def wait(self) -> None:
        self.network.wait(self.operation)

    def is_completed(self) -> bool:
        return self.operation.done


class Message(NamedTuple):
    """torch's P2POp."""

    op: Callable[..., Work]
    tensor: Tensor
    peer: int
    group: Group
    tag: int = 0


class Rank(threading.local):
    """The rank that this thread is."""

    world: Group
    made: list[Group]
    calls: Calls

    def begin(self, world: Group) -> None:
        self.world, self.made, self.calls = world, [], Calls()

    @property
    def WORLD(self) -> Group:  # noqa: N802  # torch's name
        return self.world


RANK = Rank()


class CallsOfThread:
    """Counts the calls of each rank separately."""

    def begin(self, key: str) -> int:
        return RANK.calls.begin(key)

    def await_call(self, key: str, number: int) -> None:
        RANK.calls.await_call(key, number)


def _start(group: Group | None, kind: str, facts: tuple[Any, ...], data: Any, execute: Any) -> Work:
    group = group or RANK.world

    def run(operations: Sequence[Operation]) -> None:
        check_same(operations)
        execute([operation.data for operation in operations])

    operation = Operation(group.own, kind, facts, data, run)
    group.network.call(group.group_name, group.ranks, operation)
    return Work(group.network, operation)


def _ended(work: Work, later: bool) -> Work | None:
    if later:
        return work
    work.wait()
    return None


def _facts(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple((str(tensor.dtype), tensor.numel()) for tensor in tensors)


def all_reduce(
    tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> Work | None:
    is_max = op == dist.ReduceOp.MAX

    def execute(tensors: list[Tensor]) -> None:
        stacked = torch.stack(tensors)
        result = stacked.amax(0) if is_max else stacked.sum(0, dtype=tensor.dtype)
        for each in tensors:
            each.copy_(result)

    return _ended(_start(group, "all_reduce", (is_max, *_facts(tensor)), tensor, execute), async_op)


def reduce_scatter(part: Tensor, whole: Tensor, group: Group, async_op: bool = False) -> Any:
    def execute(pairs: list[tuple[Tensor, Tensor]]) -> None:
        total = torch.stack([each for _, each in pairs]).sum(0, dtype=whole.dtype)
        for (own, _), result in zip(pairs, total.view(len(pairs), -1), strict=True):
            own.copy_(result.view_as(own))

    facts = _facts(part, whole)
    return _ended(_start(group, "reduce_scatter", facts, (part, whole), execute), async_op)


def all_gather(whole: Tensor, part: Tensor, group: Group, async_op: bool = False) -> Any:
    def execute(pairs: list[tuple[Tensor, Tensor]]) -> None:
        result = torch.cat([each.reshape(-1) for _, each in pairs])
        for own, _ in pairs:
            own.copy_(result.view_as(own))

    facts = _facts(whole, part)
    return _ended(_start(group, "all_gather", facts, (whole, part), execute), async_op)


def broadcast(
    tensor: Tensor, src: int, group: Group | None = None, async_op: bool = False
) -> Work | None:
    source = (group or RANK.world).ranks.index(src)

    def execute(tensors: list[Tensor]) -> None:
        for index, each in enumerate(tensors):
            if index != source:
                each.copy_(tensors[source])

    return _ended(_start(group, "broadcast", (src, *_facts(tensor)), tensor, execute), async_op)


def reduce(tensor: Tensor, dst: int, group: Group, async_op: bool = False) -> Work | None:
    target = group.ranks.index(dst)

    def execute(tensors: list[Tensor]) -> None:
        tensors[target].copy_(torch.stack(tensors).sum(0, dtype=tensor.dtype))

    return _ended(_start(group, "reduce", (dst, *_facts(tensor)), tensor, execute), async_op)


class _Rows(NamedTuple):
    """One rank's part of an all-to-all."""

    found: Tensor
    rows: Tensor
    received: list[int]
    sent: list[int]


def all_to_all_single(
    output: Tensor, rows: Tensor, received: list[int], sent: list[int], group: Group
) -> None:
    def execute(all_rows: list[_Rows]) -> None:
        parts = [each.rows.split(each.sent) for each in all_rows]
        for index, own in enumerate(all_rows):
            coming = [part[index] for part in parts]
            if [len(part) for part in coming] != own.received:
                raise Mismatch(f"rank {index} of {group.ranks} receives other numbers of rows")
            own.found.copy_(torch.cat(coming))

    facts = (str(rows.dtype), tuple(rows.shape[1:]))
    _start(group, "all_to_all", facts, _Rows(output, rows, received, sent), execute).wait()


def barrier(group: Group | None = None) -> None:
    _start(group, "barrier", (), None, lambda _: None).wait()


def broadcast_object_list(object_list: list[Any], src: int, group: Group | None = None) -> None:
    source = (group or RANK.world).ranks.index(src)

    def execute(lists: list[list[Any]]) -> None:
        for each in lists:
            each[:] = list(lists[source])

    _start(group, "broadcast_objects", (src,), object_list, execute).wait()


def gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: Group | None = None
) -> None:
    target = (group or RANK.world).ranks.index(dst)

    def execute(given: list[tuple[Any, list[Any]]]) -> None:
        given[target][1][:] = [each for each, _ in given]

    _start(group, "gather_objects", (dst,), (obj, object_gather_list), execute).wait()


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int = 0,
    group: Group | None = None,
) -> None:
    source = (group or RANK.world).ranks.index(src)

    def execute(given: list[tuple[list[Any], list[Any]]]) -> None:
        for (found, _), each in zip(given, given[source][1], strict=True):
            found[0] = each

    data = scatter_object_output_list, scatter_object_input_list
    _start(group, "scatter_objects", (src,), data, execute).wait()


def all_gather_object(object_list: list[Any], obj: Any, group: Group | None = None) -> None:
    def execute(given: list[tuple[list[Any], Any]]) -> None:
        for found, _ in given:
            found[:] = [each for _, each in given]

    _start(group, "all_gather_objects", (), (object_list, obj), execute).wait()


def _message(kind: str, tensor: Tensor, peer: int, group: Group | None, tag: int) -> Work:
    group = group or RANK.world
    pair = (min(group.own, peer), max(group.own, peer))
    operation = Operation(group.own, kind, (tag, *_facts(tensor)), tensor, exchange_message)
    if group.network.one_communicator and group.backend != grid.NCCL_OF_PAIRS:
        group.network.in_line(group.group_name, operation)
    group.network.call(f"pair of {group.group_name}", pair, operation)
    return Work(group.network, operation)


def isend(tensor: Tensor, dst: int, group: Group | None = None, tag: int = 0) -> Work:
    return _message("send", tensor, dst, group, tag)


def irecv(tensor: Tensor, src: int, group: Group | None = None, tag: int = 0) -> Work:
    return _message("receive", tensor, src, group, tag)


def batch_isend_irecv(messages: list[Message]) -> list[Work]:
    """Run as one call of the whole group, whose own communicator NCCL uses for batches."""
    group = messages[0].group

    def execute(batches: list[list[Message]]) -> None:
        sent: dict[tuple[int, int], Tensor] = {}
        for rank, batch in zip(group.ranks, batches, strict=True):
            sent |= {(rank, each.peer): each.tensor for each in batch if each.op is isend}
        for rank, batch in zip(group.ranks, batches, strict=True):
            for each in batch:
                if each.op is irecv:
                    each.tensor.copy_(sent.pop((each.peer, rank)))
        if sent:
            raise Mismatch(f"messages without a receiver: {list(sent)}")

    facts = tuple((each.op.__name__, each.tag, *_facts(each.tensor)) for each in messages)
    return [_start(group, "batch", facts, messages, execute)]


def new_group(
    ranks: Sequence[int] | None = None, timeout: timedelta | None = None, backend: str | None = None
) -> Group | None:
    """Make a group. All ranks make all groups in the same order."""
    world = RANK.world
    members = world.ranks if ranks is None else tuple(ranks)
    name = f"group {len(RANK.made) + 1}"
    made = Group(world.network, name, members, world.own, timeout, backend)
    RANK.made.append(made)
    return made if world.own in members else None


FUNCTIONS = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "all_to_all_single": all_to_all_single,
    "barrier": barrier,
    "broadcast_object_list": broadcast_object_list,
    "gather_object": gather_object,
    "scatter_object_list": scatter_object_list,
    "all_gather_object": all_gather_object,
    "isend": isend,
    "irecv": irecv,
    "batch_isend_irecv": batch_isend_irecv,
    "P2POp": Message,
    "new_group": new_group,
    "destroy_process_group": lambda group=None: None,
    "is_initialized": lambda: True,
    "get_backend": lambda group=None: "gloo",
    "get_rank": lambda group=None: (group or RANK.world).rank(),
    "get_world_size": lambda group=None: (group or RANK.world).size(),
    "get_process_group_ranks": lambda group: list(group.ranks),
    "get_global_rank": lambda group, rank: group.ranks[rank],
    "group": RANK,
}


@contextmanager
def simulated() -> Iterator[None]:
    """Replace torch.distributed's calls. Stages exchange messages as they do on GPUs."""
    on_gpus = grid._make_channels

    def channels(
        columns: Any, layout: Any, rank: int, _device: Any, timeout: timedelta | None
    ) -> Any:
        return on_gpus(columns, layout, rank, torch.device("cuda"), timeout)

    with pytest.MonkeyPatch.context() as patch:
        for name, function in FUNCTIONS.items():
            patch.setattr(dist, name, function)
        patch.setattr(comm, "_reduce_scatter", reduce_scatter)
        patch.setattr(comm, "_all_gather", all_gather)
        patch.setattr(comm, "CALLS", CallsOfThread())
        patch.setattr(grid, "_make_channels", channels)
        yield


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    one_queue: bool = False,
    one_communicator: bool = False,
) -> list[Any]:
    """Return function(rank, *arguments) of each rank. Raises the first failure: Stuck, Mismatch, or a rank's own error."""
    network = Network(one_queue=one_queue, one_communicator=one_communicator)
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        failure: BaseException | None = None
        torch.set_num_threads(1)
        RANK.begin(Group(network, "world", tuple(range(size)), rank))
        try:
            results[rank] = function(rank, *arguments)
        except BaseException as error:
            failure = error
        network.end(failure)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for _ in threads:
        network.start()
    with simulated():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if network.failure is not None:
        raise network.failure
    return [results[rank] for rank in range(size)]
