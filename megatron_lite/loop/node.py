"""What one rank does for all of its node: ranks that see the same files needn't all parse what these say of their tensors."""

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_lite.loop.failure import all_or_none

T = TypeVar("T")
Group = dist.ProcessGroup | None

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def node_group(everybody: dist.ProcessGroup, timeout: timedelta) -> Group:
    """Of the ranks on this rank's machine, on gloo; None where it is alone. Collective over everybody, once in a process."""
    machines: list[str] = [""] * dist.get_world_size(everybody)
    dist.all_gather_object(machines, _machine(), group=everybody)
    here = [rank for rank, machine in enumerate(machines) if machine == machines[dist.get_rank()]]
    if len(here) == 1:
        return None
    # Its members alone make it: naming those of all nodes would be a meeting of the whole world for each.
    made: dist.ProcessGroup = dist.new_group(here, backend="gloo", timeout=timeout, use_local_synchronization=True)
    return made


def _machine() -> str:
    """Names alone may be alike, as those of containers."""
    return f"{socket.gethostname()} {_BOOT.read_text() if _BOOT.is_file() else ''}"


def once_a_node(call: Callable[[], T], node: Group) -> T:
    """What call() returns on the first rank of a node, on all of its ranks; when it raises one of our errors anywhere, all raise it.

    Collective over all ranks. call: gives the same on all of them, and what it gives is of our own making (a checkpoint's pickles
    were read as inert records long before). What can't be passed on, as a plugin's tensors may be, each rank makes for itself.
    """
    ranks = [] if node is None else dist.get_process_group_ranks(node)
    first = not ranks or ranks[0] == dist.get_rank()
    with _garbage_left():
        made = all_or_none(lambda: [call()] if first else [])
        passed = made if node is None else _passed(made, ranks[0], node, first=first)
    return passed[0] if passed else call()


def _passed(made: list[T], source: int, node: dist.ProcessGroup, *, first: bool) -> list[T]:
    """A list of one, as the first rank has it; of none where it can't be passed on."""
    box: list[Any] = [made]
    if not first:
        dist.broadcast_object_list(box, source, group=node)
        return made if box[0] is None else box[0]
    try:
        dist.broadcast_object_list(box, source, group=node)
    except Exception:  # of whatever class, it comes before anything is sent
        dist.broadcast_object_list([None], source, group=node)
    return made


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Looking for garbage among hundreds of thousands of objects that all stay takes four times as long as making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
