"""How a run that fails ends: at once on all ranks, with its first cause reported once.

The first rank to count itself in the rendezvous store prints its error, all others are silent. Ranks that only see a
peer go away wait a moment before, so that the peer can report why; one that was killed can't, and then the broken
connection is all there is to report. Whatever fails on one rank alone (a file that only it can't
read) is raised through `all_or_none`, so that all ranks raise the same.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megaconv.errors import CheckpointError, LayoutError, NotExpressible, UnknownFamily, UsageError
from megaconv.terminal import show

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
KEY = "megatron_lite/first failure"
"""In the store, from the first failure on."""
PATIENCE_S = 2.0


class TrainingError(CheckpointError):
    """A run that can't go on: a loss that is no number, data that ends."""

    exit_status = 1


class SharedError(CheckpointError):
    """An error of one rank, as all of them raise it."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


SAME_EVERYWHERE = (SharedError, TrainingError, UsageError, LayoutError, NotExpressible, UnknownFamily)
"""Errors that every rank finds by itself: none of them is to be named."""


def all_or_none(call: Callable[[], T]) -> T:
    """call() on every rank; when it raises one of our errors on any, the first rank's is raised on all.

    A collective: every rank has to come here.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return call()
    error: CheckpointError | None = None
    try:
        result = call()
    except CheckpointError as found:
        error = found
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, None if error is None else (str(error), error.exit_status))
    first = next((item for item in gathered if item is not None), None)
    if first is not None:
        raise SharedError(*first) from error
    return result


def report(error: BaseException, where: str, store: "Store | None") -> int:
    """Print the first cause once, over all ranks; returns the exit status.

    where: `rank 3 (tp 1 pp 1 dp 0)`. store: None before ranks have met: then one of each machine reports.
    """
    speaks = partial(_first, store) if store is not None else _is_first_here
    if isinstance(error, CheckpointError):
        text = str(error) if isinstance(error, SAME_EVERYWHERE) or store is None else f"{where}: {error}"
        if speaks():
            _print(text)
        return error.exit_status
    if store is not None and _is_lost_connection(error):
        time.sleep(PATIENCE_S)  # for a rank that has a cause of its own to report it
        silent = "was silent for longer than --distributed-timeout-minutes (does it hang?)"
        gone = "ended without a message (was it killed?)"
        if speaks():
            _print(
                f"{where}: lost the connection to another rank, which {silent if 'imed out' in str(error) else gone}"
            )
    elif speaks():
        traceback.print_exception(error)
        _print(f"{where}: {type(error).__name__}: {error}")
    return 1


def report_first(text: str, store: "Store") -> None:
    """Unless another rank was quicker. For a thread, with a connection of its own to the store."""
    if _first(store):
        _print(text)


def report_alone(text: str) -> None:
    """Without a store, where every rank finds the same by itself: one of each machine reports."""
    if _is_first_here():
        _print(text)


def _is_lost_connection(error: BaseException) -> bool:
    """A collective that failed since another rank is gone; gloo and NCCL give a message, and no type of their own."""
    words = ("by peer", "Broken pipe", "Connection refused", "NCCL", "gloo", "imed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _is_first_here() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _first(store: "Store") -> bool:
    """Whether no other rank was quicker."""
    try:
        return store.add(KEY, 1) == 1
    except RuntimeError:  # the store went away with the process that kept it
        return True


def tell_launcher(text: str) -> None:
    """Leave the cause in torchrun's error file, so that its own summary names it too."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        found = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": found}), encoding="utf-8")


def _print(text: str) -> None:
    tell_launcher(text)
    show(f"megatron_lite: error: {text}", sys.stderr)
    sys.stderr.flush()
