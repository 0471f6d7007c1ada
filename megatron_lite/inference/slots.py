"""The interface of generation to a model: growing rows of tokens, each in a slot."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megaconv.errors import CheckpointError, UsageError


@dataclass(frozen=True)
class Feed:
    """Tokens to append to a slot."""

    slot: int
    start: int
    """Number of the slot's tokens to keep; 0 begins a new row."""
    tokens: tuple[int, ...]
    adapter: int | None = None
    """Number of the adapter (adapters.py); None: the first one."""


@dataclass(frozen=True)
class Scored:
    """Scores of each token of a row except the first, given the tokens before it. Log-probabilities are from the raw logits."""

    log_probs: Tensor
    """float32 [tokens - 1]."""
    greedy: Tensor
    """bool [tokens - 1]: True if the token is the likeliest."""
    top_ids: Tensor
    """int64 [tokens - 1, n]: the likeliest tokens."""
    top_log_probs: Tensor
    """float32 [tokens - 1, n]: their log-probabilities."""


class NotFinite(CheckpointError):
    """The logits are NaN or infinite, so no token can be chosen."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are NaN or infinite, so no token can be chosen: its weights are damaged, or too large for the "
            "dtype of the computation (try --dtype fp32)"
        )


def sound(logits: Tensor) -> list[bool]:
    """Return for each row of [rows, vocabulary] whether a token can be chosen."""
    # The maximum is NaN or +infinity if any logit is.
    found: list[bool] = logits.amax(-1).isfinite().tolist()
    return found


def require_finite(scored: Scored) -> Scored:
    """Return the scores. Raises NotFinite if a log-probability is NaN or infinite."""
    if not bool(scored.log_probs.isfinite().all()):
        raise NotFinite
    return scored


def require_known(tokens: Collection[int], vocab: int) -> None:
    """Raise UsageError for a token outside the vocabulary."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab:
            raise UsageError(f"token {token} is outside the model's vocabulary of {vocab:,}")


def require_top(flag: str, count: int, vocab: int) -> None:
    """Raise UsageError if a flag asks for more likeliest tokens than there are."""
    if count > vocab:
        raise UsageError(f"{flag} {count} exceeds the model's vocabulary of {vocab:,}")


class LanguageModel(Protocol):
    """A model as generation and scoring use it."""

    @property
    def slots(self) -> int:
        """Number of rows that the model has room for."""
        ...

    @property
    def length(self) -> int:
        """Length of the longest row."""
        ...

    def extend(self, feeds: Sequence[Feed]) -> Tensor:
        """Return the logits after the last token of each feed, float32 [feeds, vocabulary] on the CPU.

        The feeds have distinct slots.
        """
        ...

    @property
    def recurrent(self) -> bool:
        """True if a row has a state, so that a feed can't drop the slot's last tokens."""
        ...

    @property
    def copied(self) -> Sequence[int]:
        """The slots among which rows can be copied."""
        ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy every source's row to its target. Sources are read before any target changes. All slots are in `copied`."""
        ...

    def forget(self, slots: Sequence[int]) -> None:
        """Erase the rows of these slots."""
        ...

    def score(
        self, rows: Sequence[Sequence[int]], top: int = 0, adapter: int | None = None
    ) -> list[Scored]:
        """Score rows. top: number of likeliest tokens to return. It changes no slot. adapter: see Feed."""
        ...


class VectorModel(LanguageModel, Protocol):
    """A LanguageModel that makes vectors of texts too."""

    def embed(
        self, rows: Sequence[Sequence[int]], pooling: str, adapter: int | None = None
    ) -> Tensor:
        """Return the vectors of rows, float32 [rows, hidden] on the CPU, each of length 1. It changes no slot.

        pooling: one of settings.embedding.POOLINGS. adapter: see Feed. Raises NotExpressible for a model whose last hidden states are
        no vectors of texts, such as a reward model.
        """
        ...


@dataclass
class DraftCounts:
    """Numbers of drafted tokens."""

    steps: int = 0
    """Number of steps of rows that had drafted tokens."""
    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Count a step of one row."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted

    @property
    def tokens_a_step(self) -> float:
        """The mean number of tokens that such a step gave a row: 1, and the accepted ones."""
        return 1 + self.accepted / max(self.steps, 1)


@runtime_checkable
class Drafter(Protocol):
    """A LanguageModel that can also guess the next tokens of rows, and check several guesses in one turn."""

    drafts: int
    """The largest number of tokens to guess."""
    counts: DraftCounts

    def verify(self, feeds: Sequence[Feed]) -> Tensor:
        """Return the logits after every token of all feeds, one feed after the other: float32 [tokens, vocabulary] on the CPU.

        The next feed of a slot may drop tokens of this one. If the model is recurrent, it drops none, or all of them.
        """
        ...

    def draft(self, feeds: Sequence[Feed], count: int) -> list[tuple[int, ...]]:
        """Guess `count` tokens behind each feed.

        feeds: for each slot the tokens that follow those of its last turn: token i of a feed is the one behind position
        start + i, which that turn had.
        """
        ...


AllLogits = Callable[[Sequence[Sequence[int]]], list[Tensor]]
"""Rows of tokens -> for each row the logits after all of its tokens, float32 [tokens, vocabulary]."""


class Recomputed:
    """A model without a cache: it computes whole rows each time."""

    def __init__(self, logits: AllLogits, slots: int, length: int) -> None:
        self.slots, self.length, self._logits = slots, length, logits
        self.copied = range(slots)
        self.recurrent = False
        self._rows: list[list[int]] = [[] for _ in range(slots)]

    def extend(self, feeds: Sequence[Feed]) -> Tensor:
        for feed in feeds:
            self._rows[feed.slot] = [*self._rows[feed.slot][: feed.start], *feed.tokens]
        return torch.stack(
            [logits[-1] for logits in self._logits([self._rows[feed.slot] for feed in feeds])]
        )

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        rows = [list(self._rows[source]) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            self._rows[target] = row

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._rows[slot] = []

    def score(
        self, rows: Sequence[Sequence[int]], top: int = 0, adapter: int | None = None
    ) -> list[Scored]:
        return [
            judge(logits[:-1], torch.tensor(row[1:]), top)
            for row, logits in zip(rows, self._logits(rows), strict=True)
        ]


def judge(logits: Tensor, tokens: Tensor, top: int) -> Scored:
    """Return the scores of tokens. logits float32 [tokens, vocabulary]: each row predicts one token."""
    log_probs = logits.log_softmax(-1)
    best = log_probs.topk(max(top, 1), -1)
    picked = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    is_best = best.indices[:, 0] == tokens
    return Scored(picked, is_best, best.indices[:, :top], best.values[:, :top])
