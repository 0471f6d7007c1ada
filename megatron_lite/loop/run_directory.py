"""Checks the directory of --save before anything is read: used by one run, writable, and shared by all machines.

<root>/.lock      during a run, or after a run was killed. Rank 0 locks it; the lock ends with rank 0.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from formats.run_lock import OF_A_RUN, RunLock
from formats.stores.addresses import is_store
from megaconv.errors import TargetExists, UsageError
from megatron_lite.loop import store_claim
from megatron_lite.processes.failure import all_or_none
from megatron_lite.processes.launch import Place
from megatron_lite.processes.node import once_a_node
from megatron_lite.settings.config import Settings

RESTART_PATIENCE_S = 120.0
"""Waiting time for the lock after a restart. A file server may notice late that the former rank 0 has ended."""


@contextmanager
def held(settings: Settings, place: Place) -> Iterator[None]:
    """Hold the directory. Collective.

    Raises UsageError if it can't be written, TargetExists if another run saves there.
    """
    saving = settings.checkpointing
    if saving.save is None:
        yield
        return
    if is_store(saving.save):
        with store_claim.held(saving.save, place.rank, _patience_s()):
            yield
        return
    root = Path(saving.save)
    lock = RunLock(Path(os.path.realpath(root)), OF_A_RUN)
    all_or_none(lambda: None if place.rank else _take(lock, root, _patience_s()))
    try:
        if not settings.lora.wanted:  # only rank 0 writes adapters
            once_a_node(lambda: _require_shared(root), place.node)
        yield
    finally:
        if lock.is_held:
            lock.leave()


def _patience_s() -> float:
    return RESTART_PATIENCE_S if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) else 0.0


def _take(lock: RunLock, root: Path, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while True:
        try:
            return lock.take()
        except BlockingIOError:
            if time.monotonic() >= end:
                raise TargetExists(
                    f"--save {root}: another run saves there just now; wait until it has ended, or choose another directory",
                    code="target-busy",
                ) from None
            time.sleep(1)
        except OSError as error:
            raise UsageError(
                f"--save {root}: can't be written: {error.strerror}; choose another directory"
            ) from error


def _require_shared(root: Path) -> None:
    """Raise UsageError on a machine that doesn't see the file that rank 0 has created."""
    if not (root / OF_A_RUN).is_file() or not os.access(root, os.W_OK | os.X_OK):
        raise UsageError(
            f"--save {root}: {socket.gethostname()} can't write where rank 0 does; choose a directory that all machines share"
        )
