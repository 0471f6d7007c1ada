"""A running batch: requests join when a slot is free and leave when they end. Every turn advances the others.

A turn computes either a part of the waiting prompts, oldest first, or one token of every row whose prompt is read. The
two kinds alternate, so that a long prompt does not block the other rows. A beam search has several slots; its rows
advance with all others. If a request's logits are NaN or infinite, the request ends with an error and the others
continue.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.inference.beams import Beam, BeamRules, Search, merged
from megatron_lite.inference.free_slots import FreeSlots, Held
from megatron_lite.inference.grammar import Grammar, Matcher
from megatron_lite.inference.sampling import PLAIN, Likelihood, Sampling, choose, likelihood
from megatron_lite.inference.slots import Feed, LanguageModel, sound

PROMPT_TOKENS = 512
"""Largest number of prompt tokens in one turn."""
NO_TOKEN = -1


@dataclass(frozen=True)
class Request:
    """A prompt, and how to continue it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = PLAIN
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a row and belong to it."""
    log_probs: int | None = None
    """Number of likeliest tokens to return, besides the chosen token's log-probability; None: no log-probabilities."""
    beams: BeamRules | None = None
    """Rules of a beam search for the likeliest rows; `sampling` and `log_probs` are then ignored."""
    adapter: int | None = None
    """See slots.Feed."""
    grammar: Grammar | None = None
    """The form of the answer; a beam search ignores it."""

    @property
    def rows(self) -> int:
        """Number of slots that the request needs."""
        return 1 if self.beams is None else self.beams.width


@dataclass(frozen=True)
class Step:
    """One token of a request, or its end without a token: the rows of a beam search, or an error."""

    number: int
    """The request's number, from `add`."""
    token: int
    likelihood: Likelihood | None
    end: str | None
    """`stop` (a stop id, or the end of a beam search), `length`, `error` (see slots.NotFinite); None: the request continues."""
    beams: tuple[Beam, ...] = ()


@dataclass
class _Row:
    number: int
    request: Request
    tokens: list[int]
    """The prompt and the generated tokens."""
    search: Search | None
    matcher: Matcher | None = None
    slots: tuple[int, ...] = ()
    done: int = 0
    """Number of tokens in its slots; while the prompt is being read, in the first slot."""

    @property
    def waits_for(self) -> int:
        """Number of tokens of the prompt that still have to be read."""
        return len(self.tokens) - self.done

    @property
    def held(self) -> Held:
        """The tokens in its slot. The rows of a beam search are not reused."""
        if self.search is not None:
            return Held()
        return Held(self.tokens[: self.done], self.request.adapter)

    def part(self, count: int) -> Feed:
        """Return a feed with the next tokens of the prompt."""
        tokens = tuple(self.tokens[self.done : self.done + count])
        return Feed(self.slots[0], self.done, tokens, self.request.adapter)

    def feeds(self) -> list[Feed]:
        """Return feeds with the last token of all of its rows."""
        lasts = [self.tokens] if self.search is None else self.search.rows
        return [
            Feed(slot, self.done, (row[-1],), self.request.adapter)
            for slot, row in zip(self.slots, lasts, strict=False)
        ]


@dataclass
class RunningBatch:
    """A model's running batch of requests."""

    model: LanguageModel
    prompt_tokens: int = PROMPT_TOKENS
    paused: bool = False
    """True while no waiting request may get a slot."""
    reuse_rows: bool = False
    """True if a prompt continues the row of an earlier request that begins with the same tokens."""
    free: FreeSlots = field(init=False)
    _waiting: deque[_Row] = field(default_factory=deque)
    _reading: list[_Row] = field(default_factory=list)
    _going: list[_Row] = field(default_factory=list)
    _numbers: int = 0
    _read_last: bool = False

    def __post_init__(self) -> None:
        self.free = FreeSlots(self.model, reuse=self.reuse_rows)

    def add(self, request: Request) -> int:
        """Add a request and return its number. Raises UsageError if no slot has room for it."""
        check(request, self.model.length)
        if not 0 < request.rows <= len(self.model.copied):
            raise UsageError(
                f"{request.rows} beams need as many slots, and the model has {len(self.model.copied)} for one prompt"
            )
        self._numbers += 1
        search = (
            None
            if request.beams is None
            else request.beams.search(request.max_tokens, request.stop_ids)
        )
        matcher = None if request.grammar is None else request.grammar.start()
        row = _Row(self._numbers, request, list(request.prompt), search, matcher)
        self._waiting.append(row)
        return self._numbers

    def cancel(self, number: int) -> None:
        """Free the request's slots. If the request has ended, nothing happens."""
        self._waiting = deque(row for row in self._waiting if row.number != number)
        for row in [*self._reading, *self._going]:
            if row.number == number:
                self._leave(row)

    @property
    def busy(self) -> bool:
        """True while a request waits, is being read, or generates."""
        return bool(self._waiting or self._reading or self._going)

    @property
    def counts(self) -> tuple[int, int]:
        """(requests with a slot, requests that wait for a slot)."""
        return len(self._reading) + len(self._going), len(self._waiting)

    def turn(self) -> list[Step]:
        """Run one turn. Returns [] if only a part of a prompt was read, or if there is nothing to do."""
        while self._waiting and not self.paused and self._give_slots(self._waiting[0]):
            self._reading.append(self._waiting.popleft())
        if self._reading and not (self._read_last and self._going):
            self._read_last = True
            return self._read()
        self._read_last = False
        return self._advance(self._going) if self._going else []

    def forget_rows(self) -> None:
        """Begin every later request with an empty slot, because something else has used the model's slots."""
        self.free.forget()

    def _give_slots(self, row: _Row) -> bool:
        """Give the row its slots. False if too few are free. Later requests then wait too, or this one would wait forever."""
        if row.search is not None:
            row.slots = self.free.take_several(row.request.rows)
            return bool(row.slots)
        taken = self.free.take(row.request.prompt, row.request.adapter, self._running)
        if taken is None:
            return False
        slot, row.done = taken
        row.slots = (slot,)
        return True

    def _running(self) -> dict[int, Held]:
        """Return the rows of slots that are not free."""
        return {row.slots[0]: row.held for row in [*self._reading, *self._going]}

    def _read(self) -> list[Step]:
        """Read as many whole prompts as fit into a turn, or a part of the oldest prompt."""
        budget = self.prompt_tokens
        feeds: list[tuple[_Row, int]] = []
        for row in self._reading:
            count = row.waits_for
            if row is self._reading[0]:
                count = min(count, budget)
            if count <= budget:
                feeds.append((row, count))
                budget -= count
        logits = self.model.extend([row.part(count) for row, count in feeds])
        counted = []
        for row, count in feeds:
            row.done += count
            if not row.waits_for:
                self._reading.remove(row)
                self._going.append(row)
            counted.append((row, 1))
        return self._taken(counted, logits)

    def _advance(self, rows: Sequence[_Row]) -> list[Step]:
        fed = [(row, row.feeds()) for row in rows]
        logits = self.model.extend([feed for _, feeds in fed for feed in feeds])
        for row, _ in fed:
            row.done += 1
        return self._taken([(row, len(feeds)) for row, feeds in fed], logits)

    def _taken(self, rows: Sequence[tuple[_Row, int]], logits: Tensor) -> list[Step]:
        """Process the logits. rows: (row, its number of logits). A prompt that is not fully read gives no step."""
        steps = []
        copies = []
        good = sound(logits)
        end = 0
        for row, count in rows:
            own = slice(end, end + count)
            end += count
            if not all(good[own]):
                # NaN in the cache would get into the sums of the next row.
                self.model.forget(row.slots)
                row.done = 0
                self._leave(row)
                steps.append(Step(row.number, NO_TOKEN, None, "error"))
            elif row.waits_for > 0:
                continue
            elif row.search is None:
                last = logits[own][0]
                steps.append(self._take(row, last))
            elif sources := row.search.take(logits[own]):
                from_slots = [row.slots[source] for source in sources]
                copies.append((from_slots, row.slots[: len(sources)]))
            else:
                self._leave(row)
                beams = tuple(row.search.found())
                steps.append(Step(row.number, NO_TOKEN, None, "stop", beams))
        sources, targets = merged(copies)
        if sources:
            self.model.copy(sources, targets)
        return steps

    def _take(self, row: _Row, logits: Tensor) -> Step:
        request = row.request
        token = self._choose(row, logits)
        known = None
        if request.log_probs is not None:
            known = likelihood(logits, token, request.log_probs)
        row.tokens.append(token)
        generated = len(row.tokens) - len(request.prompt)
        end = None
        if token in request.stop_ids or (row.matcher is not None and row.matcher.ended):
            end = "stop"
        elif generated == request.max_tokens:
            end = "length"
        if end is not None:
            self._leave(row)
        return Step(row.number, token, known, end)

    def _choose(self, row: _Row, logits: Tensor) -> int:
        generated = row.tokens[len(row.request.prompt) :]
        sampling, matcher = row.request.sampling, row.matcher
        if matcher is None:
            return choose(logits, row.tokens, sampling, generated=generated)
        allowed = matcher.allowed(len(logits))
        token = choose(logits, row.tokens, sampling, generated=generated, allowed=allowed)
        matcher.take(token)
        return token

    def _leave(self, row: _Row) -> None:
        (self._going if row in self._going else self._reading).remove(row)
        for slot in row.slots:
            self.free.give_back(slot, row.held)


def check(request: Request, length: int) -> None:
    """Raise UsageError for a request that does not fit into a slot of `length` tokens."""
    if not request.prompt:
        raise UsageError("the prompt is empty, and there is no token to begin with")
    if request.max_tokens < 1:
        raise UsageError(f"max_tokens is {request.max_tokens}; it must be 1 or more")
    needed = len(request.prompt) + request.max_tokens
    if needed > length:
        raise UsageError(
            f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} to generate make {needed}; "
            f"there is room for {length}"
        )


@dataclass
class Answer:
    """The whole result of a request."""

    tokens: list[int] = field(default_factory=list)
    likelihoods: list[Likelihood] = field(default_factory=list)
    end: str | None = None
    beams: tuple[Beam, ...] = ()


def generate(model: LanguageModel, requests: Sequence[Request]) -> list[Answer]:
    """Run all requests in one running batch, and return the answers in the order of the requests."""
    batch = RunningBatch(model)
    answers = {batch.add(request): Answer() for request in requests}
    for step in steps(batch):
        answer = answers[step.number]
        answer.end, answer.beams = step.end, step.beams
        if step.token != NO_TOKEN:
            answer.tokens.append(step.token)
        if step.likelihood is not None:
            answer.likelihoods.append(step.likelihood)
    return list(answers.values())


def steps(batch: RunningBatch) -> Iterator[Step]:
    """Yield steps until no request is left."""
    while batch.busy:
        yield from batch.turn()
