"""The processes that torchrun or srun starts for one conversion. They agree on it, watch each other and end together.

    store       the ranks' messages: digests, and who failed first (the store of torch.distributed's rendezvous)
    gloo        the watch: twice a second rank 0 asks every other rank for its state; a process that is killed drops its
                connection, which is noticed at once
    the store's connection (store_watch.py)     drops when the process that started the ranks is killed

If one rank ends, all ranks end: a rank that learns of it sends itself SIGTERM, and ends as any interrupted conversion
does. The first rank to fail reports the cause; the others report nothing. Torch is imported only if there are several
ranks.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

from formats.signals import ENDING
from megaconv.engine.store_watch import (
    StoreWatch,
    can_be_reached,
    is_kept_by_torchrun,
    silence,
)
from megaconv.errors import CheckpointError, Interrupted, UsageError, is_interruption
from megaconv.extras import require_torch

JOIN_SECONDS = 60
"""Seconds that ranks wait for each other at the beginning, and that a rank may be silent later."""
_ROUND_SECONDS = 0.5
_POLL_SECONDS = 0.03
_PATIENCE_SECONDS = 2.0
"""Seconds that an interrupted rank waits for news of another rank's end, which may have caused the interruption."""
_EXIT_SECONDS = 15.0
"""Seconds that rank 0 waits for the other ranks to end before it. Only a rank that hangs, or a very busy machine, needs them."""
_WORKING, _DONE, _ENDED = range(3)


class Ranks:
    """A conversion by one process. With several processes, `Joined` overrides these methods, which do nothing here."""

    rank, size = 0, 1

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until all ranks arrive here without an error. If one has failed, this raises on all ranks."""

    def agree(self, what: str, value: str) -> None:
        """Raises UsageError unless all ranks pass the same value."""

    def first_goes_first(self) -> AbstractContextManager[None]:
        """A context manager for a block that other ranks enter after rank 0 has left it."""
        return nullcontext()

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """A context manager for a block that other ranks enter after rank 0 has left it. It can be used repeatedly."""
        if self.rank:
            self.gather("")
        yield
        if not self.rank:
            self.gather("")

    def gather(self, text: str) -> list[str]:
        """Every rank's text, ordered by rank. Waits for all ranks."""
        return [text]

    def counting(self, advance: Callable[[int], None]) -> Callable[[int], None]:
        """A function for the bytes that this rank has moved.

        Through it, rank 0's `advance` gets the bytes of all ranks.
        """
        return advance

    def fail(self, error: BaseException) -> bool:
        """End the other ranks because of this error. Returns True if the first rank to end was interrupted."""
        return is_interruption(error)


ALONE = Ranks()


def started_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """The ranks that torchrun has started, or srun if MASTER_ADDR gives the address of rank 0; otherwise ALONE."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        words = environment.get(rank, ""), environment.get(size, "")
        if (
            "MASTER_ADDR" in environment
            and all(word.isdigit() for word in words)
            and int(words[1]) > 1
        ):
            address = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', '29500')}"
            return Joined(int(words[0]), int(words[1]), address)
    return ALONE


class Joined(Ranks):
    """One of several ranks. A context manager for the main thread, which gets the signals when a rank fails."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        """Prepare this rank. address: host:port of rank 0."""
        self.rank, self.size, self._address = rank, size, address
        self._state, self._moved, self._gathered = _WORKING, 0, 0
        self._lost: int | None = None
        """A rank that ended without reporting an error."""
        self._lost_count = 0
        self._without_store = False
        self._first: str | None = None
        self._reports = False
        """True if this rank was the first to end and has to report the cause."""
        self._advance: Callable[[int], None] = lambda count: None
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._watch = threading.Thread(
            target=self._watch_ranks if rank == 0 else self._answer,
            name="watch",
            daemon=True,
        )

    def __enter__(self) -> Ranks:
        try:
            self._join()
        except Interrupted:
            if self.rank:
                raise SystemExit(1) from None  # rank 0 reports it
            raise
        if self.rank:
            # All ranks make the same plan, and rank 0 prints its warnings.
            logging.disable(logging.WARNING)
        self._store_watch = StoreWatch(self._address, self._lose_store)
        try:
            # The watch interrupts at once if another rank has ended already.
            self._watch.start()
        except BaseException as error:
            self._end(error)
        return self

    def _join(self) -> None:
        """Connect to the other ranks. Raises CheckpointError if they don't come."""
        # torch prints pages when a rank dies; megaconv prints one line.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        require_torch("a conversion by several processes")
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed import init_process_group
        from torch.distributed.rendezvous import rendezvous

        if is_kept_by_torchrun() and not can_be_reached(self._address):
            raise CheckpointError(silence(self._address), code="rank-lost")
        wait = timedelta(seconds=JOIN_SECONDS)
        # torchrun keeps one store for all of its attempts. The prefix hides the messages of earlier attempts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            address = f"tcp://{self._address}"
            store, *_ = next(rendezvous(address, self.rank, self.size, timeout=wait))
            self._store: Any = PrefixStore(attempt, store)
            init_process_group(
                "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.size,
                timeout=wait,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"rank {self.rank} of {self.size}: can't connect to the others "
                f"at {self._address}: {reason}",
                code="rank-lost",
            ) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            try:
                self._finish()
            except BaseException as late:
                error = late
        if error is not None:
            self._end(error)

    def _end(self, error: BaseException) -> NoReturn:
        """End this rank and the others. Raises what this rank reports, or SystemExit if another rank reports the cause."""
        self.fail(error)
        self._leave()
        if not self._reports:
            raise SystemExit(1) from None
        if self._without_store and isinstance(error, Interrupted):
            raise CheckpointError(silence(self._address)) from None
        if self._lost is not None and isinstance(error, Interrupted):
            raise CheckpointError(
                f"rank {self._lost} ended without reporting an error: was it killed, or its machine lost?",
                code="rank-lost",
            ) from None
        raise error

    def _finish(self) -> None:
        """Wait for the other ranks. Raises Interrupted if one of them still fails."""
        from torch import distributed

        self._state = _DONE
        self._wake.set()
        self._watch.join()
        self._store_watch.stop()
        if self._state == _ENDED:
            raise Interrupted
        distributed.destroy_process_group()

    # Messages between ranks.

    def agree(self, what: str, value: str) -> None:
        logging.disable(logging.NOTSET)
        if self.rank == 0:
            self._store.set(what, value)
        elif self._wait_for(what) != value:
            raise UsageError(
                f"rank {self.rank} has a different {what} than rank 0; give all ranks the same command, version and files"
            )

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        if self.rank:
            self._wait_for("first")
        yield
        if not self.rank:
            self._store.set("first", "")

    def gather(self, text: str) -> list[str]:
        self._gathered += 1
        self._store.set(f"gather/{self._gathered}/{self.rank}", text)
        return [self._wait_for(f"gather/{self._gathered}/{rank}") for rank in range(self.size)]

    def _wait_for(self, name: str) -> str:
        """The value that another rank has set or will set.

        Raises Interrupted if the other rank can't set it any more.
        """
        while True:
            try:
                if self._store.check([name]):
                    return str(self._store.get(name).decode())
            except RuntimeError:  # the store is gone: the watch will soon report why
                if self._state == _ENDED:
                    raise Interrupted from None
            time.sleep(_POLL_SECONDS)

    # Failures.

    def fail(self, error: BaseException) -> bool:
        _ignore_signals()
        interrupted = is_interruption(error)
        if interrupted and self._first is None:
            self._watch.join(_PATIENCE_SECONDS)
        first = self._claim("interrupted" if interrupted else "failed")
        self._state = _ENDED
        self._wake.set()
        if self.rank == 0:
            self._wait_for_others()
        return first.startswith("interrupted")

    def _claim(self, how: str) -> str:
        """The kind of end of the first rank (interrupted, failed) and its number.

        Claims to be the first if no other rank has.
        """
        with self._lock:
            if self._first is None:
                mine = f"{how} {self.rank}"
                try:
                    self._first = str(self._store.compare_set("end", "", mine).decode())
                except RuntimeError:
                    # The store is gone: rank 0 reports, or rank 1 if rank 0 is gone too.
                    reporter = 1 if self._lost == 0 else 0
                    self._first = mine if self.rank == reporter else f"interrupted {reporter}"
                self._reports = self._first == mine
            return self._first

    def _wait_for_others(self) -> None:
        """Let rank 0 wait for the others.

        Rank 0 may run the store, and it removes the staging directory that others write into.
        """
        until = time.monotonic() + _EXIT_SECONDS
        with suppress(RuntimeError):
            while (
                self._store.add("left", 0) < self.size - 1 - self._lost_count
                and time.monotonic() < until
            ):
                time.sleep(_POLL_SECONDS)

    def _leave(self) -> None:
        self._store_watch.stop()
        with suppress(RuntimeError):
            self._store.add("left", self.rank > 0)
        self._watch.join(_PATIENCE_SECONDS)

    # The watch, in its own thread.

    def counting(self, advance: Callable[[int], None]) -> Callable[[int], None]:
        self._advance = advance
        return self._count

    def _count(self, count: int) -> None:
        with self._lock:
            self._moved += count

    def _watch_ranks(self) -> None:
        """Rank 0's watch: asks all other ranks in turn, and tells them the state: working, done, or ended."""
        known, shown = _WORKING, 0
        while known == _WORKING:
            self._wake.wait(_ROUND_SECONDS)
            self._wake.clear()
            states, moved = [self._state], self._moved
            for rank in range(1, self.size):
                try:
                    _send(rank, _WORKING)
                    state, count = _receive(rank)
                except RuntimeError:
                    self._lost, state, count = rank, _ENDED, 0
                    self._lost_count += 1
                    self._claim("interrupted")
                states.append(state)
                moved += count
            if _ENDED in states:
                known = _ENDED
            elif set(states) == {_DONE}:
                known = _DONE
            if moved > shown:
                self._advance(moved - shown)
                shown = moved
        for rank in range(1, self.size):
            with suppress(RuntimeError):
                _send(rank, known)
        self._set_known(known)

    def _answer(self) -> None:
        """The watch of another rank: answers as long as rank 0 asks."""
        known = _WORKING
        while known == _WORKING:
            try:
                known, _ = _receive(0)
                if known == _WORKING:
                    _send(0, self._state, self._moved)
            except RuntimeError:
                self._lost, known = 0, _ENDED
                self._claim("interrupted")
        self._set_known(known)

    def _lose_store(self) -> None:
        self._without_store = True
        self._set_known(_ENDED)

    def _set_known(self, known: int) -> None:
        """Record the state. If a rank has ended, wake the main thread with SIGTERM, whatever it waits for."""
        if known == _ENDED and self._state != _ENDED:
            self._state = _ENDED
            os.kill(os.getpid(), signal.SIGTERM)


def _ignore_signals() -> None:
    """Ignore the signals that end a process, and one that arrives meanwhile."""
    while True:
        try:
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)
        except BaseException as error:
            if not is_interruption(error):
                raise
        else:
            return


def _send(rank: int, *words: int) -> None:
    import torch

    torch.distributed.send(torch.tensor([*words, 0][:2]), rank)


def _receive(rank: int) -> tuple[int, int]:
    import torch

    words = torch.zeros(2, dtype=torch.int64)
    torch.distributed.recv(words, rank)
    return int(words[0]), int(words[1])
