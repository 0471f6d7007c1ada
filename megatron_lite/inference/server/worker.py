"""The only thread that uses the model. It receives requests from the server's event loop and sends the tokens back."""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from megatron_lite.inference.batching import NO_TOKEN, RunningBatch, Step
from megatron_lite.inference.model import IDLE_S, EngineModel
from megatron_lite.inference.requests import Request
from megatron_lite.inference.server.errors import NoAnswer, Overloaded, ShuttingDown
from megatron_lite.inference.slots import Feed, LanguageModel, NotFinite, Scored, VectorModel

T = TypeVar("T")


@dataclass(eq=False)
class Ticket:
    """A group of requests. Their steps arrive in one queue as (index of the request, step)."""

    steps: "asyncio.Queue[tuple[int, Step]]"
    loop: asyncio.AbstractEventLoop
    numbers: dict[int, int] = field(default_factory=dict)
    """Number in the running batch -> index of the request; only requests that have not ended."""
    size: int = 0


class Worker:
    """Runs the model on its thread for the requests of the event loop."""

    def __init__(
        self, model: EngineModel, most_waiting: int, failed: Callable[[BaseException], None]
    ) -> None:
        """most_waiting: number of requests without a slot.

        failed: called on the thread if the model fails; the thread then ends.
        """
        self.model = model
        self._failed = failed
        self._batch = RunningBatch(model, reuse_rows=True)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._alone: deque[Callable[[], None]] = deque()
        """Functions that need all slots, and wait until they are free."""
        self._tickets: dict[int, Ticket] = {}
        self._room = model.slots + most_waiting
        self._open = 0
        self._lock = threading.Lock()
        self._ending = False
        self.prompt_tokens = 0
        """Number of accepted prompt tokens."""
        self.tokens = 0
        """Number of generated tokens."""
        self.without_answer = 0
        """Number of requests that ended because logits were NaN or infinite."""
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens that were not computed again."""
        return self._batch.free.reused_tokens

    @property
    def counts(self) -> tuple[int, int]:
        """(requests with a slot, requests that wait)."""
        return self._batch.counts

    # Called in the event loop.

    def submit(self, requests: Sequence[Request]) -> Ticket:
        """Add requests. Raises Overloaded if too many wait already."""
        self._take(len(requests))
        ticket = Ticket(asyncio.Queue(), asyncio.get_running_loop(), size=len(requests))
        self._commands.put(lambda: self._add(ticket, requests))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel the requests of a ticket that have not ended."""
        self._commands.put(lambda: self._cancel(ticket))

    async def between(self, function: Callable[[VectorModel], T]) -> T:
        """Run function(model) between two turns. It must not change any slot.

        Raises NoAnswer if the function raises NotFinite.
        """
        return await self._call(function, self._commands.put)

    async def alone(self, function: Callable[[LanguageModel], T]) -> T:
        """Run function(model) after all requests with a slot have ended; waiting requests follow later.

        As with between(): raises NoAnswer if the function raises NotFinite. If its caller stops waiting, the function
        ends at its next call of the model.
        """

        def cleaned(model: LanguageModel) -> T:
            try:
                return function(model)
            except NotFinite:
                self.model.forget(range(self.model.slots))  # the function may have used all slots
                raise

        return await self._call(
            cleaned, lambda command: self._commands.put(lambda: self._alone.append(command))
        )

    async def _call(
        self, function: Callable[[VectorModel], T], enqueue: Callable[[Callable[[], None]], Any]
    ) -> T:
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
                found = function(
                    _WhileWanted(self.model, lambda: not future.cancelled() and not self._ending)
                )
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
        """Stop the worker; wait until the current turn is computed."""
        self._ending = True
        self._commands.put(None)
        self._thread.join()

    def _take(self, count: int) -> None:
        with self._lock:
            if self._ending:
                raise ShuttingDown
            if self._open + count > self._room:
                raise Overloaded(
                    f"{self._open} requests are being served or wait; there is room for {self._room}"
                )
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
                    self._batch.forget_rows()
                    continue
                for step in self._batch.turn():
                    self._deliver(step)
        except BaseException as error:
            self._failed(error)

    def _obey(self) -> bool:
        """Process all commands; wait for one if there is nothing else to do. Returns False at the end."""
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
        """Cancel one request of a ticket. Called in the event loop."""

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
    """Call back in the event loop. If the loop has ended, nothing happens, because no caller waits."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *values)


class _Unwanted(Exception):
    pass


class _WhileWanted:
    """A model for one function. Its methods raise as soon as the function's result is no longer needed."""

    def __init__(self, model: VectorModel, wanted: Callable[[], bool]) -> None:
        self._model, self._wanted = model, wanted
        self.slots, self.length = model.slots, model.length
        self.copied, self.recurrent = model.copied, model.recurrent

    def _checked(self) -> VectorModel:
        if not self._wanted():
            raise _Unwanted
        return self._model

    def extend(self, feeds: Sequence[Feed]) -> Tensor:
        return self._checked().extend(feeds)

    def embed(
        self, rows: Sequence[Sequence[int]], pooling: str, adapter: int | None = None
    ) -> Tensor:
        return self._checked().embed(rows, pooling, adapter)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._checked().copy(sources, targets)

    def forget(self, slots: Sequence[int]) -> None:
        self._checked().forget(slots)

    def score(
        self, rows: Sequence[Sequence[int]], top: int = 0, adapter: int | None = None
    ) -> list[Scored]:
        return self._checked().score(rows, top, adapter)
