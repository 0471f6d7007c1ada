"""Detects dead and stuck ranks independently of the collectives, and ends all ranks with the cause in one line.

NCCL itself waits for a peer whose machine is gone, or which is busy elsewhere. A thread of every rank writes a counter,
the rank's current place in the code and its counts of calls to the rendezvous store. Each rank reads only its
neighbour's entry, so that the store's load stays small for any number of ranks. Rank 0 reads all entries while it
stands still itself, and blames the rank that is furthest behind (blame.py).
"""

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from types import FrameType
from typing import Protocol

from megatron_lite.processes.blame import Beat, blamed
from megatron_lite.processes.calls import Counts

BEAT_S = 5.0
DEAD_S = 60.0
"""Time without a heartbeat. A process that is only slow, or reads a file, still sends heartbeats."""
GRACE_S = 10.0
"""Time from a rank's reported cause until the other ranks end. Ranks that find an error by themselves can report it first."""


class Store(Protocol):
    """The interface of torch's store. It needs its own connection, because a waiting call blocks all other calls."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def place_of(frame: FrameType | None) -> str:
    """Return `function (file:line)` of a thread's innermost call."""
    if frame is None:
        return ""
    file = frame.f_code.co_filename.replace("\\", "/")
    short = "/".join(file.rsplit("/", 2)[-2:])
    return f"{frame.f_code.co_name} ({short}:{frame.f_lineno})"


class Neighbour:
    """The state of the rank that this rank watches."""

    def __init__(self, rank: int, now: float) -> None:
        self._rank = rank
        self._count: int | None = None
        self._beaten = now

    def heard(self, count: int | None, now: float) -> str | None:
        """Process the number of the latest heartbeat. Returns the problem, or None."""
        if count != self._count:
            self._count, self._beaten = count, now
        if now - self._beaten <= DEAD_S:
            return None
        return f"rank {self._rank} has given no sign of life for {DEAD_S:g} seconds (was it killed? is its machine gone?)"


class OwnProgress:
    """The time since this rank last made a step or a call."""

    def __init__(self, now: float) -> None:
        self._last: tuple[int, Counts] | None = None
        self._moved = now

    def still_s(self, steps: int, calls: Counts, now: float) -> float:
        """Return the time without progress in seconds."""
        if self._last != (steps, calls):
            self._last, self._moved = (steps, calls), now
        return now - self._moved


class Heartbeat:
    """The heartbeat thread. The training loop reports steps with step()."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        patience: timedelta | None,
        failed: str,
        calls: Callable[[], Counts],
        end: Callable[[str | None], None],
    ) -> None:
        """Start the thread.

        patience: time that a rank may block others; None if there are no steps. failed: the key that exists after a
        rank has reported a cause. calls(): this rank's counts of calls.
        end(cause, or None if it is reported already): called in the thread.
        """
        self._store, self._rank, self._world = store, rank, world
        self._failed, self._calls, self._end = failed, calls, end
        self._watched = (rank + 1) % world
        self._patience = math.inf if patience is None else patience.total_seconds()
        self._steps, self._over = 0, threading.Event()
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def step(self, number: int) -> None:
        """Report the number of completed steps."""
        self._steps = number

    def stop(self) -> None:
        """Stop the thread."""
        self._over.set()

    def _run(self) -> None:
        now = time.monotonic()
        neighbour, progress, count = Neighbour(self._watched, now), OwnProgress(now), 0
        with suppress(RuntimeError):  # store_watch.py handles a lost store
            while not self._over.wait(BEAT_S if count else 0):
                count += 1
                beat = self._beat(count, progress)
                self._store.set(_key(self._rank), json.dumps(asdict(beat)))
                is_reported = self._store.check([self._failed])
                cause = None if is_reported else self._problem(beat, neighbour)
                if is_reported:
                    self._over.wait(GRACE_S)
                if (is_reported or cause is not None) and not self._over.is_set():
                    self._end(cause)
                    return

    def _beat(self, count: int, progress: OwnProgress) -> Beat:
        """Return this rank's heartbeat."""
        calls, steps = self._calls(), self._steps
        still_s = progress.still_s(steps, calls, time.monotonic())
        where = place_of(sys._current_frames().get(self._main))
        return Beat(count, steps, still_s, where, calls)

    def _problem(self, own: Beat, neighbour: Neighbour) -> str | None:
        """Return the reason to end all ranks, or None."""
        watched = self._read(self._watched)
        dead = neighbour.heard(None if watched is None else watched.count, time.monotonic())
        if dead is not None or self._rank != 0 or own.still_s < self._patience:
            return dead
        beats = [self._read(rank) for rank in range(self._world)]
        known = [beat for beat in beats if beat is not None]
        rank = blamed(known, self._patience) if len(known) == self._world else None
        return None if rank is None else self._accusation(rank, known[rank])

    def _accusation(self, rank: int, beat: Beat) -> str:
        minutes = f"{self._patience / 60:g} minutes"
        return f"rank {rank} has been at step {beat.step + 1} for {minutes}, and the others wait for it: in {beat.where}"

    def _read(self, rank: int) -> Beat | None:
        key = _key(rank)
        return Beat(**json.loads(self._store.get(key))) if self._store.check([key]) else None


def _key(rank: int) -> str:
    return f"megatron_lite/beat/{rank}"
