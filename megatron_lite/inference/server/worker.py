"""The one thread that uses the model: requests come to it from the server's event loop, and their tokens go back there."""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from megatron_lite.inference.batching import NO_TOKEN, Request, RunningBatch, Step
from megatron_lite.inference.model import IDLE_S, EngineModel
from megatron_lite.inference.server.errors import NoAnswer, Overloaded, ShuttingDown
from megatron_lite.inference.slots import Feed, LanguageModel, NotFinite, Scored

T = TypeVar("T")


@dataclass(eq=False)
class Ticket:
    """Of some requests that belong together; their steps arrive in one queue as (which of them, its step)."""

    steps: "asyncio.Queue[tuple[int, Step]]"
    loop: asyncio.AbstractEventLoop
    numbers: dict[int, int] = field(default_factory=dict)
    """In the running batch -> which of them; those that haven't ended."""
    size: int = 0


class Worker:
    def __init__(self, model: EngineModel, most_waiting: int, failed: Callable[[BaseException], None]) -> None:
        """most_waiting: requests without a slot. failed: called on the thread when the model fails, which is its end."""
        self.model, self._failed = model, failed
        self._batch = RunningBatch(model)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._alone: deque[Callable[[], None]] = deque()
        """What needs all slots, and waits until they are free."""
        self._tickets: dict[int, Ticket] = {}
        self._room = model.slots + most_waiting
        self._open, self._lock, self._ending = 0, threading.Lock(), False
        self.prompt_tokens = self.tokens = 0
        """Accepted and generated so far."""
        self.without_answer = 0
        """Requests that ended because logits were NaN or infinite."""
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> tuple[int, int]:
        """(requests with a slot, requests that wait)."""
        return self._batch.counts

    # Called in the event loop.

    def submit(self, requests: Sequence[Request]) -> Ticket:
        """Raises Overloaded where too many wait already."""
        self._take(len(requests))
        ticket = Ticket(asyncio.Queue(), asyncio.get_running_loop(), size=len(requests))
        self._commands.put(lambda: self._add(ticket, requests))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Of what hasn't ended; does no harm where all has."""
        self._commands.put(lambda: self._cancel(ticket))

    async def between(self, function: Callable[[LanguageModel], T]) -> T:
        """function(model) between two turns; it may touch no slot. Of this and the next: raises NoAnswer where it raises NotFinite."""
        return await self._call(function, self._commands.put)

    async def alone(self, function: Callable[[LanguageModel], T]) -> T:
        """function(model) when all requests that have a slot have ended; those that wait come afterwards.

        Of both: when nobody waits for it any more, it ends with the next thing that it asks of the model.
        """

        def cleaned(model: LanguageModel) -> T:
            try:
                return function(model)
            except NotFinite:
                self.model.forget(range(self.model.slots))  # all of which it may have used
                raise

        return await self._call(cleaned, lambda command: self._commands.put(lambda: self._alone.append(command)))

    async def _call(self, function: Callable[[LanguageModel], T], enqueue: Callable[[Callable[[], None]], Any]) -> T:
        self._take(1)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def answer(found: T) -> None:
            if not future.cancelled():
                future.set_result(found)

        def fail() -> None:
            if not future.cancelled():
                future.set_exception(NoAnswer())

        def command() -> None:
            try:
                found = function(_WhileWanted(self.model, lambda: not future.cancelled() and not self._ending))
                _tell(loop, answer, found)
            except _Unwanted:
                pass
            except NotFinite:
                self.without_answer += 1
                _tell(loop, fail)
            finally:
                self._give_back(1)

        enqueue(command)
        return await future

    def stop(self) -> None:
        """Waits until the turn that is being computed is done."""
        self._ending = True
        self._commands.put(None)
        self._thread.join()

    def _take(self, count: int) -> None:
        with self._lock:
            if self._ending:
                raise ShuttingDown
            if self._open + count > self._room:
                raise Overloaded(f"{self._open} requests are being served or wait; there is room for {self._room}")
            self._open += count

    def _give_back(self, count: int) -> None:
        with self._lock:
            self._open -= count

    # On the thread.

    def _run(self) -> None:
        try:
            while self._obey():
                self._batch.paused = bool(self._alone)
                if self._alone and not self._batch.counts[0]:
                    self._alone.popleft()()
                    continue
                for step in self._batch.turn():
                    self._deliver(step)
        except BaseException as error:
            self._failed(error)

    def _obey(self) -> bool:
        """Everything that was asked for; waits where there is nothing else to do. False at the end."""
        while True:
            try:
                idle = not (self._batch.busy or self._alone)
                command = self._commands.get(block=idle, timeout=IDLE_S if idle else None)
            except queue.Empty:
                if not idle:
                    return True
                self.model.idle()
                continue
            if command is None:
                return False
            command()

    def _add(self, ticket: Ticket, requests: Sequence[Request]) -> None:
        for which, request in enumerate(requests):
            number = self._batch.add(request)
            self.prompt_tokens += len(request.prompt)
            ticket.numbers[number] = which
            self._tickets[number] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        for number in list(ticket.numbers):
            self._batch.cancel(number)
            self._end(ticket, number)

    def cancel_one(self, ticket: Ticket, which: int) -> None:
        """Of the requests of a ticket this one. Called in the event loop."""

        def command() -> None:
            for number in [number for number, other in ticket.numbers.items() if other == which]:
                self._batch.cancel(number)
                self._end(ticket, number)

        self._commands.put(command)

    def _end(self, ticket: Ticket, number: int) -> None:
        del ticket.numbers[number], self._tickets[number]
        self._give_back(1)

    def _deliver(self, step: Step) -> None:
        self.tokens += sum(len(beam.tokens) for beam in step.beams) if step.token == NO_TOKEN else 1
        self.without_answer += step.end == "error"
        ticket = self._tickets[step.number]
        which = ticket.numbers[step.number]
        if step.end is not None:
            self._end(ticket, step.number)
        _tell(ticket.loop, ticket.steps.put_nowait, (which, step))


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *values: Any) -> None:
    """Nothing where the loop has ended: then nobody waits."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *values)


class _Unwanted(Exception):
    pass


class _WhileWanted:
    """A model for one function, which ends as soon as it isn't wanted any more."""

    def __init__(self, model: LanguageModel, wanted: Callable[[], bool]) -> None:
        self._model, self._wanted = model, wanted
        self.slots, self.length, self.copied = model.slots, model.length, model.copied

    def _checked(self) -> LanguageModel:
        if not self._wanted():
            raise _Unwanted
        return self._model

    def extend(self, feeds: Sequence[Feed]) -> Tensor:
        return self._checked().extend(feeds)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._checked().copy(sources, targets)

    def forget(self, slots: Sequence[int]) -> None:
        self._checked().forget(slots)

    def score(self, rows: Sequence[Sequence[int]], top: int = 0) -> list[Scored]:
        return self._checked().score(rows, top)
