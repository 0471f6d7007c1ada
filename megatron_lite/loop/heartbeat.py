"""Signs of life beside the collectives: a rank that is gone, or that others wait for in vain, ends all of them with the cause in one line.

NCCL itself waits: for a peer whose machine is gone, or which is at something else. A thread of every rank writes into the
rendezvous store how often it has done so, and what the rank is at; each rank reads its neighbour's, so that there is little
for the store to do, however many they are.
"""

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import Protocol

BEAT_S = 5.0
DEAD_S = 60.0
"""Without a beat. A process that is only slow, or reads a file, beats on."""
GRACE_S = 10.0
"""From a cause that one rank has told until the others end, so that those that find it by themselves can do so first."""
COLLECTIVES = ("megatron_lite/parallel/comm.py", "torch/distributed/")
"""Files in which a rank waits for others,"""
WAITS = ("_sum_over_world",)
"""and functions: on a GPU the end of a step is where all that was started before is waited for."""


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    count: int
    step: int
    waiting: bool
    """For other ranks, or for its GPU."""
    where: str
    """`function (file:line)` of the rank's main thread."""


class Store(Protocol):
    """As torch's; over a connection of its own, since a call that waits holds up all others."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def at(frame: FrameType | None) -> tuple[bool, str]:
    """(whether it waits for others, where it is), of a main thread."""
    waiting, where = False, ""
    while frame is not None:
        code = frame.f_code
        file = code.co_filename.replace("\\", "/")
        waiting = waiting or any(part in file for part in COLLECTIVES) or code.co_name in WAITS
        where = where or f"{code.co_name} ({'/'.join(file.rsplit('/', 2)[-2:])}:{frame.f_lineno})"
        frame = frame.f_back
    return waiting, where


class Neighbour:
    """What is known of the rank that this one looks after."""

    def __init__(self, rank: int, patience: float, now: float) -> None:
        """patience: seconds in which a rank that is at anything but waiting has to come to another step."""
        self._rank, self._patience = rank, patience
        self._beat: Beat | None = None
        self._beaten, self._moved = now, now

    def heard(self, beat: Beat | None, now: float) -> str | None:
        """The last that it said -> what is wrong, if anything is."""
        if beat is not None and (self._beat is None or beat.count != self._beat.count):
            self._beaten = now
            if self._beat is None or beat.step != self._beat.step or beat.waiting:
                self._moved = now
            self._beat = beat
        if now - self._beaten > DEAD_S:
            return f"rank {self._rank} has given no sign of life for {DEAD_S:g} seconds (was it killed? is its machine gone?)"
        if self._beat is not None and now - self._moved > self._patience:
            return (
                f"rank {self._rank} has been at step {self._beat.step + 1} for {self._patience / 60:g} minutes, "
                f"and the others wait for it: in {self._beat.where}"
            )
        return None


class Heartbeat:
    """The thread. Steps are counted by whoever makes them: step()."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        patience: timedelta | None,
        failed: str,
        end: Callable[[str | None], None],
    ) -> None:
        """patience None: there are no steps. failed: the key that exists when a rank has told a cause.

        end(cause, or None where it is told): called in that thread.
        """
        self._store, self._rank, self._failed, self._end = store, rank, failed, end
        self._watched = (rank + 1) % world
        self._patience = math.inf if patience is None else patience.total_seconds()
        self._steps, self._over = 0, threading.Event()
        self._main = threading.main_thread().ident or 0
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def step(self, number: int) -> None:
        """So many steps are done."""
        self._steps = number

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        neighbour, count = Neighbour(self._watched, self._patience, time.monotonic()), 0
        with suppress(RuntimeError):  # a store that is gone is store_watch.py's
            while not self._over.wait(BEAT_S if count else 0):
                count += 1
                waiting, where = at(sys._current_frames().get(self._main))
                self._store.set(_key(self._rank), json.dumps(asdict(Beat(count, self._steps, waiting, where))))
                told = self._store.check([self._failed])
                cause = None if told else neighbour.heard(self._read(), time.monotonic())
                if told:
                    self._over.wait(GRACE_S)
                if (told or cause is not None) and not self._over.is_set():
                    self._end(cause)
                    return

    def _read(self) -> Beat | None:
        key = _key(self._watched)
        return Beat(**json.loads(self._store.get(key))) if self._store.check([key]) else None


def _key(rank: int) -> str:
    return f"megatron_lite/beat/{rank}"
