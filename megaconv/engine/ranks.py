"""The processes that torchrun or srun has started for one conversion: they agree on it, watch each other and end together.

    store       what ranks send each other: digests, and who was the first to fail (that of torch.distributed's rendezvous)
    gloo        the watch: twice a second rank 0 asks every other rank how it does; a process that is killed drops its
                connection, which is noticed at once
    the store's connection (store_watch.py)     drops when the process that started the ranks is killed

Whatever ends one rank ends all: those who learn of it send themselves SIGTERM, which takes the way of every interrupted
conversion. The first to fail reports its cause, the others report nothing. Torch is imported only where there are ranks.
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
from typing import Any

from formats.signals import ENDING
from megaconv.engine.store_watch import StoreWatch, silence
from megaconv.errors import CheckpointError, Interrupted, UsageError, is_interruption
from megaconv.torch_extra import require_torch

JOIN_SECONDS = 60
"""How long ranks wait for each other at the beginning, and how long one may be silent later."""
_ROUND_SECONDS = 0.5
_POLL_SECONDS = 0.03
_PATIENCE_SECONDS = 2.0
"""How long an interrupted rank waits for another one's end to be noticed, which may be behind it."""
_EXIT_SECONDS = 3.0
"""How long rank 0 waits for the others to have ended before it."""
_WORKING, _DONE, _ENDED = range(3)


class Ranks:
    """A conversion by one process. Each method does for several what its name says, and here nothing."""

    rank, size = 0, 1

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """All ranks have come here without an error, or this raises on all of them."""

    def agree(self, what: str, value: str) -> None:
        """Raises UsageError unless all ranks have the same."""

    def first_goes_first(self) -> AbstractContextManager[None]:
        """A block that other ranks enter when rank 0 has left it."""
        return nullcontext()

    def gather(self, text: str) -> list[str]:
        """Every rank's text, by rank; waits for all of them."""
        return [text]

    def counting(self, advance: Callable[[int], None]) -> Callable[[int], None]:
        """A function to be called with the bytes that this rank has moved, so that rank 0's advance gets those of all."""
        return advance

    def fail(self, error: BaseException) -> bool:
        """End the others because of this error. Whether it was an interruption, here or elsewhere, that ended the first."""
        return is_interruption(error)


ALONE = Ranks()


def started_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """The ranks that torchrun has started, or srun where MASTER_ADDR says how rank 0 is reached; else ALONE."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        words = environment.get(rank, ""), environment.get(size, "")
        if "MASTER_ADDR" in environment and all(word.isdigit() for word in words) and int(words[1]) > 1:
            address = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', '29500')}"
            return Joined(int(words[0]), int(words[1]), address)
    return ALONE


class Joined(Ranks):
    """One of several ranks. A context manager for the main thread, whose signals it takes when it fails."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        """address: host:port of rank 0."""
        self.rank, self.size, self._address = rank, size, address
        self._state, self._moved, self._gathered = _WORKING, 0, 0
        self._lost: int | None = None
        """A rank that ended without reporting an error."""
        self._without_store = False
        self._first: str | None = None
        self._reports = False
        """Whether this rank was the first to end, and has to say why."""
        self._advance: Callable[[int], None] = lambda count: None
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._watch = threading.Thread(
            target=self._watch_ranks if rank == 0 else self._answer, name="watch", daemon=True
        )

    def __enter__(self) -> Ranks:
        try:
            self._join()
        except Interrupted:
            if self.rank:
                raise SystemExit(1) from None  # rank 0 says so
            raise
        if self.rank:
            logging.disable(logging.WARNING)  # all ranks plan the same, and rank 0 says what there is to say
        self._watch.start()
        self._store_watch = StoreWatch(self._address, self._lose_store)
        return self

    def _join(self) -> None:
        """Raises CheckpointError when the others don't come."""
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it prints pages when a rank dies; we say it in a line
        require_torch("a conversion by several processes")
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed import init_process_group
        from torch.distributed.rendezvous import rendezvous

        wait, place = timedelta(seconds=JOIN_SECONDS), (self.rank, self.size)
        try:
            store = next(rendezvous(f"tcp://{self._address}", *place, timeout=wait))[0]
            # torchrun keeps one store for all of its attempts, and what an earlier one said in it is not for this one.
            self._store: Any = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            init_process_group("gloo", store=self._store, rank=place[0], world_size=place[1], timeout=wait)
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"rank {self.rank} of {self.size}: can't connect to the others at {self._address}: {reason}",
                code="rank-lost",
            ) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._finish()
            except BaseException as late:
                error = late
        if error is None:
            return
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
        """Wait for the others. Raises Interrupted if one of them fails after all."""
        from torch import distributed

        self._state = _DONE
        self._wake.set()
        self._watch.join()
        self._store_watch.stop()
        if self._state == _ENDED:
            raise Interrupted
        distributed.destroy_process_group()

    # What ranks send each other.

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
        """What another rank has set or will set. Ends by SIGTERM's exception when that can't happen any more."""
        while True:
            try:
                if self._store.check([name]):
                    return str(self._store.get(name).decode())
            except RuntimeError:  # without a store the watch will soon say why
                if self._state == _ENDED:
                    raise Interrupted from None
            time.sleep(_POLL_SECONDS)

    # Failing.

    def fail(self, error: BaseException) -> bool:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
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
        """How the first rank ended, and which that is: this one, if no other has said so before."""
        with self._lock:
            if self._first is None:
                mine = f"{how} {self.rank}"
                try:
                    self._first = str(self._store.compare_set("end", "", mine).decode())
                except RuntimeError:  # the store has gone: rank 0 reports, or rank 1 if rank 0 has gone with it
                    reporter = 1 if self._lost == 0 else 0
                    self._first = mine if self.rank == reporter else f"interrupted {reporter}"
                self._reports = self._first == mine
            return self._first

    def _wait_for_others(self) -> None:
        """Rank 0 may carry the store, and removes the staging directory, into which nobody should write any more."""
        until = time.monotonic() + _EXIT_SECONDS
        with suppress(RuntimeError):
            while self._store.add("left", 0) < self.size - 1 - (self._lost is not None) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)

    def _leave(self) -> None:
        self._store_watch.stop()
        with suppress(RuntimeError):
            self._store.add("left", self.rank > 0)
        self._watch.join(_PATIENCE_SECONDS)

    # The watch, in a thread of its own.

    def counting(self, advance: Callable[[int], None]) -> Callable[[int], None]:
        self._advance = advance
        return self._count

    def _count(self, count: int) -> None:
        with self._lock:
            self._moved += count

    def _watch_ranks(self) -> None:
        """Rank 0 asks all others in turn, with what it knows: that the work goes on, is done, or has ended."""
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
        """Another rank answers as long as rank 0 asks."""
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
        """Wake the main thread, whatever it waits for."""
        if known == _ENDED and self._state != _ENDED:
            self._state = _ENDED
            os.kill(os.getpid(), signal.SIGTERM)


def _send(rank: int, *words: int) -> None:
    import torch

    torch.distributed.send(torch.tensor([*words, 0][:2]), rank)


def _receive(rank: int) -> tuple[int, int]:
    import torch

    words = torch.zeros(2, dtype=torch.int64)
    torch.distributed.recv(words, rank)
    return int(words[0]), int(words[1])
