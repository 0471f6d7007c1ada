"""Communicators that behave as NCCL's, between ranks that are threads of one process. They carry real data.

- A communicator is created at its first use. It blocks each rank until all its ranks have come.
- Calls of one rank on one communicator run one after the other. Call k of a rank meets call k of the other ranks.
- Single messages between two ranks use a communicator of the pair. A send ends when the other rank receives.
- From torch 2.15 on, a group of the backend `nccl` has no communicators of pairs (one_communicator): messages of one rank in
  one group end one after the other, whatever their other ranks are.
- Tags are ignored. A receive gets the next message, whatever its tag is; a test fails if that is another message.

A rank's host waits in wait(). On a GPU the stream waits there, and all later work of the rank waits with it. Both give the
same order.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

PATIENCE_S = 300.0
"""Time until a test fails in which no rank moves, if the network does not find the cause earlier."""


class Stuck(Exception):
    """All ranks wait, and nothing can end the wait."""


class Mismatch(Exception):
    """Ranks met on one communicator with different calls."""


class Ended(Exception):
    """Another rank has failed."""


@dataclass(eq=False)
class Operation:
    """One call of one rank."""

    rank: int
    kind: str
    facts: tuple[Any, ...]
    """The facts that have to be the same on all ranks: dtypes, sizes, root."""
    data: Any
    execute: "Execute"
    done: bool = False
    line: list["Operation"] | None = None
    """This rank's operations that end one after the other."""

    def is_first(self) -> bool:
        return self.line is None or self.line[0] is self

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}{self.facts}"


Execute = Callable[[Sequence[Operation]], None]
"""Executes one call, given the operations of all ranks in order. Raises Mismatch."""


@dataclass(eq=False)
class Communicator:
    """The calls of all ranks of one communicator."""

    name: str
    ranks: tuple[int, ...]
    joined: set[int] = field(default_factory=set)
    queues: dict[int, list[Operation]] = field(default_factory=dict)

    def progress(self) -> bool:
        """Execute all calls to which all ranks have come. Returns whether there was one."""
        moved = False
        while all(self.queues.get(rank) for rank in self.ranks):
            heads = [self.queues[rank][0] for rank in self.ranks]
            if not _fit(heads) or not all(head.is_first() for head in heads):
                return moved
            with torch.no_grad():
                heads[0].execute(heads)
            for head in heads:
                head.done = True
                if head.line is not None:
                    head.line.pop(0)
                self.queues[head.rank].pop(0)
            moved = True
        return moved


def _fit(heads: Sequence[Operation]) -> bool:
    """Return whether the operations can meet. Two sends wait for each other forever, as two receives do."""
    kinds = [head.kind for head in heads]
    if not {"send", "receive"} & set(kinds):
        return True
    return sorted(kinds) == ["receive", "send"]


class Waiting(NamedTuple):
    """A thread that waits."""

    is_over: Callable[[], bool]
    what: str


class Network:
    """All communicators, and the threads that wait for them."""

    def __init__(self, *, one_queue: bool = False, one_communicator: bool = False) -> None:
        """one_communicator: see the top of this file.

        one_queue: a rank that starts a call waits until its earlier calls on this communicator have ended.

        So does a GPU with CUDA_DEVICE_MAX_CONNECTIONS=1: the call at the head of the only queue blocks all later work.
        """
        self.one_queue = one_queue
        self.one_communicator = one_communicator
        self._lines: dict[tuple[str, int], list[Operation]] = {}
        self.failure: BaseException | None = None
        self.running = 0
        """Threads that don't wait."""
        self._changed = threading.Condition()
        self._communicators: dict[tuple[str, tuple[int, ...]], Communicator] = {}
        self._waiting: dict[int, Waiting] = {}

    def start(self) -> None:
        """Count a thread. Call it before the thread starts."""
        with self._changed:
            self.running += 1

    def end(self, failure: BaseException | None = None) -> None:
        """Count the end of a thread."""
        with self._changed:
            self.running -= 1
            self.failure = self.failure or failure
            self._check()
            self._changed.notify_all()

    def call(self, name: str, ranks: tuple[int, ...], operation: Operation) -> None:
        """Start a call on the communicator of this name and these ranks."""
        with self._changed:
            key = name, ranks
            communicator = self._communicators.setdefault(key, Communicator(name, ranks))
            self._join(communicator, operation)
            queue = communicator.queues.setdefault(operation.rank, [])
            if self.one_queue:
                self._wait_until(lambda: not queue, f"{operation} in the only queue")
            queue.append(operation)
            try:
                moved = self._progress()
            except Mismatch as error:
                self.failure = self.failure or error
                moved = True
            if moved:
                self._changed.notify_all()
            self._raise_failure()

    def in_line(self, group: str, operation: Operation) -> None:
        """Let a message wait for all earlier messages of its rank in a group. Call it before the call begins."""
        with self._changed:
            operation.line = self._lines.setdefault((group, operation.rank), [])
            operation.line.append(operation)

    def _progress(self) -> bool:
        """Execute all calls that can be executed. Returns whether there was one."""
        moved = False
        while any(each.progress() for each in self._communicators.values()):
            moved = True
        return moved

    def _join(self, communicator: Communicator, operation: Operation) -> None:
        """Wait until all ranks have come to the communicator."""
        communicator.joined.add(operation.rank)
        self._changed.notify_all()
        self._wait_until(
            lambda: len(communicator.joined) == len(communicator.ranks),
            f"{operation} creates the communicator {communicator.name} {communicator.ranks}",
        )

    def wait(self, operation: Operation) -> None:
        """Wait until a call has ended."""
        with self._changed:
            self._wait_until(lambda: operation.done, str(operation))

    def _wait_until(self, is_over: Callable[[], bool], what: str) -> None:
        """Wait. The caller holds the lock."""
        self._raise_failure()
        if is_over():
            return
        here = threading.get_ident()
        self._waiting[here] = Waiting(is_over, what)
        self.running -= 1
        try:
            self._check()
            end = time.monotonic() + PATIENCE_S
            while not is_over() and self.failure is None:
                self._changed.wait(1.0)
                if time.monotonic() > end:
                    self.failure = self.failure or Stuck(self._state())
        finally:
            self.running += 1
            del self._waiting[here]
        self._raise_failure()

    def _check(self) -> None:
        """Find out whether all threads wait, and none can go on."""
        if self.running or not self._waiting or self.failure is not None:
            return
        if not any(waiting.is_over() for waiting in self._waiting.values()):
            self.failure = Stuck(self._state())
            self._changed.notify_all()

    def _state(self) -> str:
        return "\n".join(sorted(waiting.what for waiting in self._waiting.values()))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise Ended(str(self.failure))


def check_same(operations: Sequence[Operation]) -> None:
    """Raise Mismatch unless all ranks made the same call."""
    first = operations[0]
    for other in operations:
        if (other.kind, other.facts) != (first.kind, first.facts):
            raise Mismatch(f"{first} meets {other}")


def exchange_message(operations: Sequence[Operation]) -> None:
    """Copy one message. facts: (tag, dtype, elements)."""
    sent, received = sorted(operations, key=lambda operation: operation.kind, reverse=True)
    if sent.facts != received.facts:
        raise Mismatch(f"{sent} meets {received}")
    target: Tensor = received.data
    target.copy_(sent.data.view_as(target))
