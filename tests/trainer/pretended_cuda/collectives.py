"""torch.distributed's calls with tensors of the pretended GPU: gloo exchanges their values.

As with NCCL, each communicator has a stream, which begins after the work that is queued on the current stream. The
current stream continues at once. Until wait(), a use of the tensors is a StreamRace.

A collective keeps its tensors until wait(). A message does not keep the tensor that it sends: its caller has to.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from megatron_lite.parallel import comm
from tests.trainer.pretended_cuda.device import GpuTensor, held_of
from tests.trainer.pretended_cuda.streams import STREAMS, Event, Memory, Stream

ONLY_READS = {"isend"}
READS_SECOND = {"_reduce_scatter", "_all_gather", "all_to_all_single"}
"""Calls that write their first tensor and read the second one. All other calls write all their tensors."""


@dataclass
class Work:
    """A call that has begun."""

    real: Any
    """torch's work, or a list of works."""
    event: Event
    tensors: list[GpuTensor]
    """They stay in memory until wait()."""
    stream: Stream
    sent: WeakSet[Memory]
    """The memory of sent messages, which may be freed after the end of the call."""

    def wait(self) -> None:
        for each in self._reals():
            each.wait()
        STREAMS.current.wait_event(self.event)
        self.tensors = []

    def is_completed(self) -> bool:
        completed = all(each.is_completed() for each in self._reals())
        for memory in self.sent if completed else ():
            memory.record_stream(self.stream)
        return completed

    def _reals(self) -> Sequence[Any]:
        return self.real if isinstance(self.real, list) else [self.real]


class Message(NamedTuple):
    """torch's P2POp."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Any = None
    tag: int = 0


def _queued(
    real: Any,
    stream: Stream,
    tensors: Sequence[GpuTensor],
    reads: Sequence[GpuTensor],
    sent: Sequence[GpuTensor],
) -> Work:
    """Queue a call behind the current stream's work. reads: tensors that it does not write. sent: those of messages."""
    stream.wait_stream(STREAMS.current)
    number = stream.begin()
    kept = []
    for tensor in tensors:
        tensor.memory.use(stream, number, writes=not _is_among(tensor, reads))
        if not _is_among(tensor, sent):
            tensor.memory.record_stream(stream)
            kept.append(tensor)
    return Work(real, stream.record_event(), kept, stream, WeakSet(each.memory for each in sent))


def _is_among(tensor: GpuTensor, others: Sequence[GpuTensor]) -> bool:
    return any(tensor is each for each in others)


def _reads(name: str, tensors: list[GpuTensor]) -> list[GpuTensor]:
    """Return the tensors that a call does not write."""
    if name in ONLY_READS:
        return tensors
    first, *others = tensors
    apart = [x for x in others if x.memory is not first.memory]
    return apart if name in READS_SECOND else []


def _stream_of(name: str, group: Any, peer: Any) -> Stream:
    key = "world" if group is None else group.group_name
    return STREAMS.of_group(f"{key} {name} {peer}" if name in ("isend", "irecv") else key)


def _replaced(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, GpuTensor)]
        single = name in ("isend", "irecv")
        later = {} if single else {"async_op": True}
        found = real(*tree_map(held_of, args), **tree_map(held_of, kwargs), **later)
        peer = args[1] if single else None
        if not tensors:
            work = found
        else:
            stream = _stream_of(name, kwargs.get("group"), peer)
            sent = tensors if name == "isend" else []
            work = _queued(found, stream, tensors, _reads(name, tensors), sent)
        if async_op or single:
            return work
        work.wait()
        return None

    return call


def _batch(real: Callable[..., Any], operation: Any) -> Callable[..., Any]:
    """Return batch_isend_irecv."""
    ops = {"isend": dist.isend, "irecv": dist.irecv}

    def call(messages: list[Message]) -> list[Work]:
        real_ones = [
            operation(ops[each.op.__name__], held_of(each.tensor), each.peer, each.group, each.tag)
            for each in messages
        ]
        works = real(real_ones)
        tensors = [each.tensor for each in messages if isinstance(each.tensor, GpuTensor)]
        sent: list[Any] = [each.tensor for each in messages if each.op.__name__ == "isend"]
        stream = _stream_of("batch", messages[0].group, None)
        return [_queued(list(works), stream, tensors, sent, sent)]

    return call


CALLS = ("all_reduce", "reduce", "broadcast", "all_to_all_single", "isend", "irecv")


@contextmanager
def through_gloo() -> Iterator[None]:
    """Replace torch.distributed's calls and the backend of new groups."""
    make_group = dist.new_group

    def new_group(ranks: list[int], timeout: Any = None, backend: str | None = None) -> Any:
        return make_group(ranks, timeout=timeout, backend="gloo")

    batch = _batch(dist.batch_isend_irecv, dist.P2POp)
    changes: list[tuple[Any, str, Any]] = [
        (dist, name, _named(name, _replaced(name, getattr(dist, name)))) for name in CALLS
    ]
    changes += [(comm, name, _replaced(name, getattr(comm, name))) for name in READS_SECOND if name.startswith("_")]  # fmt: skip
    changes += [(dist, "batch_isend_irecv", batch), (dist, "P2POp", Message)]
    changes += [(dist, "new_group", new_group)]
    with ExitStack() as stack:
        for owner, name, change in changes:
            stack.enter_context(patch.object(owner, name, change))
        yield


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function
