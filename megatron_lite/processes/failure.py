"""Ends a failed run: at once on all ranks, with its first cause reported once.

The first rank to count itself in the rendezvous store prints its error; all other ranks are silent. A rank that only
loses the connection to a peer waits a moment, so that the peer can report the cause. A killed peer can't report, so the
lost connection is then the reported error.

torchrun ends with a report of some forty lines, and seven more for each failed rank. An error that all ranks find
becomes the last line of this report. One rank of each machine passes the error to torchrun and fails; the other ranks
wait until torchrun ends them.

An error on one rank only (a file that only this rank can't read) is raised through `all_or_none`, so that all ranks
raise it.
"""

import errno
import json
import os
import signal
import socket
import sys
import threading
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
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's variable with the path of a worker's error file."""
_PREFIX = "megatron-lite: error: "
KEY = "megatron_lite/first failure"
"""Key in the store; it exists after the first failure."""
PATIENCE_S = 2.0
HEAD_START_S = 1.0
"""Time until the rank that passes an error to torchrun ends. The other ranks find the same error meanwhile, and wait."""
ENDED_BY_TORCHRUN_S = 10.0


class TrainingError(CheckpointError):
    """A run can't continue: the loss is not a number, or the data ends."""

    exit_status = 1


class SharedError(CheckpointError):
    """An error of one rank that all ranks raise."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


SAME_EVERYWHERE = (
    SharedError,
    TrainingError,
    UsageError,
    LayoutError,
    NotExpressible,
    UnknownFamily,
)
"""Errors that every rank finds by itself, so the message names no rank."""


def all_or_none(call: Callable[[], T]) -> T:
    """Run call() on every rank. If it raises a CheckpointError on any rank, all ranks raise the first rank's error.

    Collective: every rank has to call this function.
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
    """Print the first cause once over all ranks, and return the exit status.

    where: `rank 3 (tp 1 pp 1 dp 0)`. store: None before the ranks have connected; one rank of each machine then
    reports.
    """
    speaks = partial(_first, store) if store is not None else _is_first_here
    if isinstance(error, SAME_EVERYWHERE) and not isinstance(error, TrainingError):
        return refuse(str(error), error.exit_status, store)
    if isinstance(error, CheckpointError):
        text = (
            str(error)
            if isinstance(error, SAME_EVERYWHERE) or store is None
            else f"{where}: {error}"
        )
        if speaks():
            _print(text)
        return error.exit_status
    if store is not None and _is_lost_connection(error):
        time.sleep(PATIENCE_S)  # gives the rank that failed first the time to report it
        silent = "was silent for longer than --distributed-timeout-minutes (does it hang?)"
        gone = "ended without a message (was it killed?)"
        if speaks():
            _print(
                f"{where}: lost the connection to another rank, which {silent if 'imed out' in str(error) else gone}"
            )
    elif _is_full_disk(error):
        if speaks():
            _print(f"{where}: {error}; make room where the output goes, or choose another place")
    elif speaks():
        traceback.print_exception(error)
        _print(f"{where}: {type(error).__name__}: {error}")
    return 1


def refuse(text: str, status: int, store: "Store | None" = None) -> int:
    """Report once an error that every rank finds, and return the exit status. store: see report."""
    if _ERROR_FILE not in os.environ:
        if _first(store) if store is not None else os.environ.get("RANK", "0") == "0":
            _print(text)
        return status
    if _hands_over(store):
        tell_launcher(text)
        if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
            time.sleep(HEAD_START_S)
    else:
        _wait_for_torchrun()
    return status


def _hands_over(store: "Store | None") -> bool:
    """Return whether this rank passes the error to torchrun. One rank of each machine does, because each has a torchrun."""
    if store is None:
        return _is_first_here()
    _first(store)  # marks the failure for ranks that look for a cause
    return _first(store, f"{KEY} on {socket.gethostname()}")


def _wait_for_torchrun() -> None:
    """Wait until torchrun ends this rank, as it does with all ranks after one has failed.

    Exit status 0 keeps this rank out of torchrun's report; the failure belongs to the other rank.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(ENDED_BY_TORCHRUN_S)


def report_first(text: str, store: "Store") -> None:
    """Print the cause unless another rank was first. For a thread with its own connection to the store."""
    if _first(store):
        _print(text)


def report_alone(text: str) -> None:
    """Print an error that every rank finds, without a store: one rank of each machine prints it."""
    if _is_first_here():
        _print(text)


def report_interrupt() -> None:
    """Report Ctrl-C before there is anything to save. All ranks receive the signal; rank 0 prints the message."""
    if os.environ.get("RANK", "0") == "0":
        show("megatron-lite: interrupted before the first step; nothing was trained", sys.stderr)


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another rank is gone.

    gloo and NCCL have messages for this error, but no error class.
    """
    words = ("by peer", "Broken pipe", "Connection refused", "NCCL", "gloo", "imed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _is_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_first_here() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _first(store: "Store", key: str = KEY) -> bool:
    """Return whether this rank is the first to use the key."""
    try:
        return store.add(key, 1) == 1
    except RuntimeError:  # the store's process has ended
        return True


def tell_launcher(text: str) -> None:
    """Write the cause to torchrun's error file, so that torchrun's summary contains it."""
    file = os.environ.get(_ERROR_FILE)
    if file:
        shown = f"{_PREFIX}{text}"
        found = {
            "message": text,
            "extraInfo": {"py_callstack": shown, "timestamp": str(int(time.time()))},
        }
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": found}), encoding="utf-8")


def _print(text: str) -> None:
    tell_launcher(text)
    show(f"{_PREFIX}{text}", sys.stderr)
    sys.stderr.flush()
