"""A running batch: requests join when a slot is free and leave when they end, and every turn moves all the others on.

A turn is either a part of the oldest waiting prompt, or one token of every row that has read its prompt. The two take turns,
so that a long prompt doesn't keep the others from going on.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.inference.sampling import PLAIN, Likelihood, Sampling, choose, likelihood
from megatron_lite.inference.slots import Feed, LanguageModel

PROMPT_TOKENS = 512
"""Of prompts, read in one turn."""


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = PLAIN
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a row, and are part of it."""
    log_probs: int | None = None
    """How many of the likeliest tokens are wanted beside the chosen one's log-probability; None: not even that."""


@dataclass(frozen=True)
class Step:
    """One token of one request."""

    number: int
    """The request's, as `add` gave it."""
    token: int
    likelihood: Likelihood | None
    end: str | None
    """`stop` (one of its stop ids), `length`; None: there is more to come."""


@dataclass
class _Row:
    number: int
    request: Request
    tokens: list[int]
    """The prompt and what came behind it."""
    slot: int = -1
    done: int = 0
    """Tokens that the slot has."""

    @property
    def waits_for(self) -> int:
        """Tokens of the prompt that aren't read yet, but for the last feed of one."""
        return len(self.tokens) - self.done


@dataclass
class RunningBatch:
    model: LanguageModel
    prompt_tokens: int = PROMPT_TOKENS
    paused: bool = False
    """Whether those that wait for a slot go on waiting."""
    _waiting: deque[_Row] = field(default_factory=deque)
    _reading: list[_Row] = field(default_factory=list)
    _going: list[_Row] = field(default_factory=list)
    _free: list[int] = field(default_factory=list)
    """A heap: the lowest first, so that rows lie side by side, and data-parallel ranks have as many of them."""
    _numbers: int = 0
    _read_last: bool = False

    def __post_init__(self) -> None:
        self._free = list(range(self.model.slots))

    def add(self, request: Request) -> int:
        """Its number. Raises UsageError for a request that no slot has room for."""
        check(request, self.model.length)
        self._numbers += 1
        self._waiting.append(_Row(self._numbers, request, list(request.prompt)))
        return self._numbers

    def cancel(self, number: int) -> None:
        """Frees its slot; nothing happens where it has ended."""
        self._waiting = deque(row for row in self._waiting if row.number != number)
        for row in [*self._reading, *self._going]:
            if row.number == number:
                self._leave(row)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._reading or self._going)

    @property
    def counts(self) -> tuple[int, int]:
        """(requests with a slot, requests that wait for one)."""
        return len(self._reading) + len(self._going), len(self._waiting)

    def turn(self) -> list[Step]:
        """What came of one turn; nothing where only a part of a prompt was read, or there is nothing to do."""
        while self._waiting and self._free and not self.paused:
            row = self._waiting.popleft()
            row.slot = heappop(self._free)
            self._reading.append(row)
        if self._reading and not (self._read_last and self._going):
            self._read_last = True
            return self._read()
        self._read_last = False
        return self._advance(self._going) if self._going else []

    def _read(self) -> list[Step]:
        """So many whole prompts as fit into a turn, or a part of the oldest."""
        first, *others = self._reading
        feeds, budget = [(first, min(first.waits_for, self.prompt_tokens))], self.prompt_tokens
        budget -= feeds[0][1]
        for row in others:
            if row.waits_for <= budget:
                feeds.append((row, row.waits_for))
                budget -= row.waits_for
        logits = self.model.extend(
            [Feed(row.slot, row.done, tuple(row.tokens[row.done : row.done + count])) for row, count in feeds]
        )
        steps = []
        for (row, count), found in zip(feeds, logits, strict=True):
            row.done += count
            if not row.waits_for:
                self._reading.remove(row)
                self._going.append(row)
                steps.append(self._take(row, found))
        return steps

    def _advance(self, rows: Sequence[_Row]) -> list[Step]:
        rows = list(rows)
        logits = self.model.extend([Feed(row.slot, row.done, (row.tokens[-1],)) for row in rows])
        for row in rows:
            row.done += 1
        return [self._take(row, found) for row, found in zip(rows, logits, strict=True)]

    def _take(self, row: _Row, logits: Tensor) -> Step:
        request = row.request
        token = choose(logits, row.tokens, request.sampling)
        known = None if request.log_probs is None else likelihood(logits, token, request.log_probs)
        row.tokens.append(token)
        end = None
        if token in request.stop_ids:
            end = "stop"
        elif len(row.tokens) - len(request.prompt) == request.max_tokens:
            end = "length"
        if end is not None:
            self._leave(row)
        return Step(row.number, token, known, end)

    def _leave(self, row: _Row) -> None:
        (self._going if row in self._going else self._reading).remove(row)
        heappush(self._free, row.slot)


def check(request: Request, length: int) -> None:
    """Raises UsageError for what no slot of so many tokens has room for."""
    if not request.prompt:
        raise UsageError("the prompt is empty, and there is no token to begin with")
    if request.max_tokens < 1:
        raise UsageError(f"max_tokens is {request.max_tokens}; it has to be 1 or more")
    needed = len(request.prompt) + request.max_tokens
    if needed > length:
        raise UsageError(
            f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} to generate make {needed}; "
            f"there is room for {length}"
        )


@dataclass
class Answer:
    """All that came of a request."""

    tokens: list[int] = field(default_factory=list)
    likelihoods: list[Likelihood] = field(default_factory=list)
    end: str | None = None


def generate(model: LanguageModel, requests: Sequence[Request]) -> list[Answer]:
    """All of them, in one running batch; in the order of the requests."""
    batch = RunningBatch(model)
    answers = {batch.add(request): Answer() for request in requests}
    for step in steps(batch):
        answer = answers[step.number]
        answer.tokens.append(step.token)
        answer.end = step.end
        if step.likelihood is not None:
            answer.likelihoods.append(step.likelihood)
    return list(answers.values())


def steps(batch: RunningBatch) -> Iterator[Step]:
    """Until nothing is left to do."""
    while batch.busy:
        yield from batch.turn()
