"""How a run that fails ends: at once on all ranks, with its first cause told once.

The rank that fails first leaves its message in the rendezvous store. Ranks that only see their peers go away wait a
moment for such a message, and the lowest of them prints it if its author could not; a rank that was killed leaves none,
and then the broken connection is all there is to tell. Whatever fails on one rank alone (a file that only it can't
read) is raised through `all_or_none`, so that all ranks raise the same.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from megaconv.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
_KEY = "megatron_lite/first failure"
_PATIENCE_S = 2.0


class TrainingError(CheckpointError):
    """A run that can't go on: a loss that is no number, data that ends."""

    exit_status = 1


class PeerError(CheckpointError):
    """Another rank's error, which that rank reports."""


def all_or_none(call: Callable[[], T]) -> T:
    """call() on every rank; when it raises one of our errors on any, the first of them is raised on all.

    A collective: every rank has to come here.
    """
    import torch.distributed as dist

    result: T | None = None
    error: CheckpointError | None = None
    try:
        result = call()
    except CheckpointError as found:
        error = found
    if dist.is_initialized() and dist.get_world_size() > 1:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if error is None else (str(error), error.exit_status))
        if error is None and any(told):
            message, status = next(item for item in told if item)
            error = PeerError(message)
            error.exit_status = status
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def report(error: BaseException, rank: int, where: str, store: "Store | None") -> int:
    """Print the first cause once, over all ranks; returns the exit status. where: `rank 3 (tp 1 pp 1 dp 0)`."""
    ours = isinstance(error, CheckpointError)
    status = int(getattr(error, "exit_status", 1)) if ours else 1
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    if store is None:
        if rank == 0:
            _print(text)
        return status
    if isinstance(error, PeerError):
        first = _first(store, text)  # the same text on every rank: the first to come prints it
        if first:
            _print(text)
    elif ours or not _is_lost_connection(error):
        if _first(store, f"{where}: {text}"):
            _print(f"{where}: {text}")
    else:
        _wait_for_the_cause(store, where)
    return status


def _is_lost_connection(error: BaseException) -> bool:
    """A collective that failed since another rank is gone; gloo and NCCL tell it in words alone."""
    words = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Connection refused",
        "NCCL",
        "Read error",
        "Write error",
        "gloo",
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _first(store: "Store", text: str) -> bool:
    """Whether no other rank was quicker."""
    try:
        return bool(store.add(_KEY + " count", 1) == 1) and (store.set(_KEY, text) is None)
    except RuntimeError:  # the store went away with the rank that kept it
        return True


def _wait_for_the_cause(store: "Store", where: str) -> None:
    """A rank with a cause of its own gets the time to tell it; after that a rank must have died without a word."""
    time.sleep(_PATIENCE_S)
    if _first(store, "a rank died"):
        _print(f"{where}: lost the connection to another rank, which ended without a message (was it killed?)")


def _print(text: str) -> None:
    print(f"megatron_lite: error: {text}", file=sys.stderr, flush=True)


def timeout(minutes: float) -> timedelta:
    """For the process groups."""
    return timedelta(minutes=minutes)
