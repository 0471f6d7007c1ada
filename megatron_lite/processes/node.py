"""Work that one rank does for its whole node: ranks with the same files needn't all parse the files' headers."""

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_lite.processes.failure import all_or_none

T = TypeVar("T")
Group = dist.ProcessGroup | None

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def node_group(everybody: dist.ProcessGroup, timeout: timedelta) -> Group:
    """Return the gloo group of the ranks on this machine; None for a single rank.

    Collective over `everybody`. Call it once in a process.
    """
    machines: list[str] = [""] * dist.get_world_size(everybody)
    dist.all_gather_object(machines, _machine(), group=everybody)
    here = [rank for rank, machine in enumerate(machines) if machine == machines[dist.get_rank()]]
    if len(here) == 1:
        return None
    # Only the members create the group. With all ranks, the whole world would have to synchronize once for each node.
    made: dist.ProcessGroup = dist.new_group(
        here, backend="gloo", timeout=timeout, use_local_synchronization=True
    )
    return made


def _machine() -> str:
    """Return an identifier of this machine. Host names alone may be equal, as in containers."""
    return f"{socket.gethostname()} {_BOOT.read_text() if _BOOT.is_file() else ''}"


def once_a_node(call: Callable[[], T], node: Group) -> T:
    """Run call() on the first rank of each node, and return its result on all ranks of the node.

    Collective over all ranks. If call() raises a CheckpointError anywhere, all ranks raise it.
    call: returns the same value on all ranks. The value consists of our own objects; a checkpoint's pickles were read
    as inert records before. A value that can't be sent, such as a plugin's tensors, is computed by each rank.
    """
    ranks = [] if node is None else dist.get_process_group_ranks(node)
    first = not ranks or ranks[0] == dist.get_rank()
    with _garbage_left():
        made = all_or_none(lambda: [call()] if first else [])
        passed = made if node is None else _passed(made, ranks[0], node, first=first)
    return passed[0] if passed else call()


def _passed(made: list[T], source: int, node: dist.ProcessGroup, *, first: bool) -> list[T]:
    """Send a list of one value from the first rank. Returns [] on other ranks if it can't be sent."""
    box: list[Any] = [made]
    if not first:
        dist.broadcast_object_list(box, source, group=node)
        return made if box[0] is None else box[0]
    try:
        dist.broadcast_object_list(box, source, group=node)
    except Exception:  # pickling fails before anything is sent, with errors of many classes
        dist.broadcast_object_list([None], source, group=node)
    return made


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Disable garbage collection.

    A search among hundreds of thousands of live objects takes four times as long as making them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
