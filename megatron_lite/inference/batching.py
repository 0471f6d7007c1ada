"""A running batch: requests join when a slot is free and leave when they end. Every turn advances the others.

A turn computes either a part of the waiting prompts, oldest first, or one token of every row whose prompt is read. The
two kinds alternate, so that a long prompt does not block the other rows. A beam search has several slots; its rows
advance with all others. If a request's logits are NaN or infinite, the request ends with an error and the others
continue.

A model that drafts (slots.Drafter) guesses the tokens behind a row. The next turn computes the logits after all of them.
A token is chosen from each as without drafts, and the guesses count as far as they are these tokens. So drafts change
neither a greedy answer nor a sampled one: a guess is accepted with the probability that the model gives it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from megaconv.errors import UsageError
from megatron_lite.inference.beams import Beam, merged
from megatron_lite.inference.free_slots import FreeSlots, Held
from megatron_lite.inference.requests import Request, check
from megatron_lite.inference.running_row import Row
from megatron_lite.inference.sampling import Likelihood, choose, likelihood
from megatron_lite.inference.slots import Drafter, Feed, LanguageModel, sound

PROMPT_TOKENS = 512
"""Largest number of prompt tokens in one turn."""
NO_TOKEN = -1


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
    drafted: bool = False
    """True if a draft guessed the token."""
    rejected: int = 0
    """Number of drafts that were wrong behind the token."""


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
    _waiting: deque[Row] = field(default_factory=deque)
    _reading: list[Row] = field(default_factory=list)
    _going: list[Row] = field(default_factory=list)
    _numbers: int = 0
    _read_last: bool = False
    _cancelled: set[int] = field(default_factory=set)
    """Numbers that were cancelled since the last turn."""

    def __post_init__(self) -> None:
        self.free = FreeSlots(self.model, reuse=self.reuse_rows)
        self._drafter = self.model if isinstance(self.model, Drafter) else None

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
        row = Row(self._numbers, request, list(request.prompt), search, matcher)
        self._waiting.append(row)
        return self._numbers

    def cancel(self, number: int) -> None:
        """Free the request's slots. If the request has ended, nothing happens."""
        self._cancelled.add(number)
        self._waiting = deque(row for row in self._waiting if row.number != number)
        for row in [*self._reading, *self._going]:
            if row.number == number:
                self._leave(row)

    def is_cancelled(self, number: int) -> bool:
        """Return whether a request was cancelled since the last turn, which may have given it several steps."""
        return number in self._cancelled

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
        self._cancelled.clear()
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

    def _give_slots(self, row: Row) -> bool:
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
        feeds: list[tuple[Row, int]] = []
        for row in self._reading:
            count = row.waits_for
            is_first = row is self._reading[0]
            if is_first:
                count = row.fitting(min(count, budget))
            if is_first or count <= budget:
                feeds.append((row, count))
                budget -= count
        logits = self.model.extend([row.part(count) for row, count in feeds])
        counted = []
        starts = [(row, row.done) for row, _ in feeds]
        for row, count in feeds:
            row.done += count
            if not row.waits_for:
                self._reading.remove(row)
                self._going.append(row)
            counted.append((row, 1))
        return self._followed(starts, self._taken(counted, logits))

    def _advance(self, rows: Sequence[Row]) -> list[Step]:
        fed = [(row, row.feeds()) for row in rows]
        starts = [(row, row.done) for row in rows]
        logits = self._logits([feed for _, feeds in fed for feed in feeds])
        counted = []
        for row, feeds in fed:
            row.done = row.done + 1 if row.search is not None else len(row.tokens)
            counted.append((row, sum(len(feed.tokens) for feed in feeds)))
        return self._followed(starts, self._taken(counted, logits))

    def _logits(self, feeds: Sequence[Feed]) -> Tensor:
        """Return the logits after all tokens of the feeds."""
        if self._drafter is None or all(len(feed.tokens) == 1 for feed in feeds):
            return self.model.extend(feeds)
        return self._drafter.verify(feeds)

    def _followed(self, fed: Sequence[tuple[Row, int]], steps: list[Step]) -> list[Step]:
        """Let the model guess the tokens behind rows that go on, and return the steps.

        fed: (row, its first position in the last turn).
        """
        drafter = self._drafter
        if drafter is None:
            return steps
        reading, going = ({row.number for row in rows} for rows in (self._reading, self._going))
        followed = [
            (row, start)
            for row, start in fed
            if row.number in reading | going and row.search is None and row.most_drafts > 0
        ]
        if not followed:
            return steps
        feeds = [row.followers(start, reads=row.number in reading) for row, start in followed]
        rooms = [self.model.length - feed.start - len(feed.tokens) + 1 for feed in feeds]
        guesses = drafter.draft(feeds, min(drafter.drafts, *rooms))
        for (row, _), guessed in zip(followed, guesses, strict=True):
            row.drafted = guessed[: row.most_drafts] if row.number in going else ()
        return steps

    def _taken(self, rows: Sequence[tuple[Row, int]], logits: Tensor) -> list[Step]:
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
                steps += self._take_all(row, logits[own])
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

    def _take_all(self, row: Row, logits: Tensor) -> list[Step]:
        """Take a token, and a further one behind each guess that was right. logits [fed tokens, vocabulary]."""
        drafted, row.drafted = row.drafted, ()
        start = row.done + len(drafted) - len(logits)
        row.stale = self.model.recurrent and bool(drafted)
        first, *further = logits[-1 - len(drafted) :]
        steps = [self._take(row, first)]
        for guess, following in zip(drafted, further, strict=True):
            if steps[-1].end is not None or steps[-1].token != guess:
                break
            row.done += 1
            steps.append(replace(self._take(row, following), drafted=True))
        accepted = len(steps) - 1
        steps[-1] = replace(steps[-1], rejected=len(drafted) - accepted)
        row.stale = row.stale and accepted < len(drafted)
        if row.stale:
            row.done = start
        if self._drafter is not None and drafted:
            self._drafter.counts.add(len(drafted), accepted)
        return steps

    def _take(self, row: Row, logits: Tensor) -> Step:
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

    def _choose(self, row: Row, logits: Tensor) -> int:
        generated = row.tokens[len(row.request.prompt) :]
        sampling, matcher = row.request.sampling, row.matcher
        if matcher is None:
            return choose(logits, row.tokens, sampling, generated=generated)
        allowed = matcher.allowed(len(logits))
        token = choose(logits, row.tokens, sampling, generated=generated, allowed=allowed)
        matcher.take(token)
        return token

    def _leave(self, row: Row) -> None:
        (self._going if row in self._going else self._reading).remove(row)
        for slot in row.slots:
            self.free.give_back(slot, row.held)


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


def steps(batch: RunningBatch, before_turn: Callable[[], None] = lambda: None) -> Iterator[Step]:
    """Yield steps until no request is left. A request that is cancelled meanwhile has no further steps.

    before_turn: called before each turn. It may add requests.
    """
    while True:
        before_turn()
        if not batch.busy:
            return
        for step in batch.turn():
            if not batch.is_cancelled(step.number):
                yield step
