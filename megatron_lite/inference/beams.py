"""Beam search with the rules of transformers' `generate`: scores, ended rows, and when to stop.

A search has no model. It takes the logits of its rows and determines the next rows. So a running batch (batching.py)
can compute the rows of many searches together with all other rows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megaconv.errors import UsageError

EarlyStopping = bool | Literal["never"]
LARGEST_LENGTH_PENALTY = 50
"""A float holds the power of every length up to a million tokens, and its inverse."""


@dataclass(frozen=True)
class Beam:
    """A row, and the sum of its generated tokens' log-probabilities; after its end divided by length ** penalty."""

    tokens: tuple[int, ...]
    """The generated tokens."""
    score: float


class Search(Protocol):
    """The state of one search."""

    rows: list[tuple[int, ...]]
    """The generated tokens of the open rows; at the start one row without tokens."""

    def take(self, logits: Tensor) -> list[int]:
        """Return for each new row the index of the row that it continues; [] at the end. logits: float32 [rows, vocabulary]."""
        ...

    def found(self) -> list[Beam]:
        """Return the rows at the end, the best first."""
        ...


class BeamRules(Protocol):
    """The rules of a kind of beam search."""

    @property
    def width(self) -> int:
        """Largest number of open rows."""
        ...

    def search(self, max_tokens: int, stop_ids: Collection[int]) -> Search: ...


@dataclass(frozen=True)
class BeamSettings:
    """transformers' rules: the search finds `width` ended rows."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    """True: stop after `width` ended rows. False: stop if no open row can become better at its present length.

    `never`: stop if no open row can become better at any length.
    """

    def __post_init__(self) -> None:
        """Raise UsageError for a length penalty whose powers would overflow."""
        if not abs(self.length_penalty) <= LARGEST_LENGTH_PENALTY:
            raise UsageError(
                f"--length-penalty {self.length_penalty} must be from -{LARGEST_LENGTH_PENALTY} to {LARGEST_LENGTH_PENALTY}"
            )

    def search(self, max_tokens: int, stop_ids: Collection[int]) -> Search:
        return _Search(self, max_tokens, stop_ids)


class _Search:
    def __init__(self, settings: BeamSettings, max_tokens: int, stop_ids: Collection[int]) -> None:
        self._settings, self._max_tokens, self._stop_ids = settings, max_tokens, stop_ids
        self.rows: list[tuple[int, ...]] = [()]
        self._scores = torch.zeros(1)
        self._ended: list[Beam] = []

    def take(self, logits: Tensor) -> list[int]:
        width = self._settings.width
        count = len(self.rows[0]) + 1
        best, beams, tokens = self._candidates(logits)
        scores = best.tolist()
        going = []
        for number, (beam, token) in enumerate(zip(beams, tokens, strict=True)):
            if count != self._max_tokens and token not in self._stop_ids:
                going.append(number)
            elif number < width:  # a row that ends counts only if it is one of the best
                self._end((*self.rows[beam], token), scores[number])
        going = going[:width]
        if not going or not self._can_improve(scores[going[0]], count):
            return []
        self.rows = [(*self.rows[beams[number]], tokens[number]) for number in going]
        self._scores = best[going]
        return [beams[number] for number in going]

    def _end(self, row: tuple[int, ...], score: float) -> None:
        """Keep an ended row if it is one of the best so far."""
        ended = Beam(row, score / len(row) ** self._settings.length_penalty)
        self._ended = sorted([*self._ended, ended], key=lambda beam: -beam.score)[
            : self._settings.width
        ]

    def found(self) -> list[Beam]:
        return self._ended

    def _candidates(self, logits: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Return (scores, rows, tokens) of the best continuations; enough that `width` of them don't end."""
        sums = (logits.log_softmax(-1) + self._scores.unsqueeze(1)).flatten()
        # A row has at most len(stop_ids) continuations that end, so at least `width` of these don't.
        wanted = max(2, 1 + len(self._stop_ids)) * self._settings.width
        best = sums.topk(min(wanted, len(sums)))
        vocab = logits.shape[-1]
        return best.values, (best.indices // vocab).tolist(), (best.indices % vocab).tolist()

    def _can_improve(self, best: float, count: int) -> bool:
        """Return whether the best open row, with the score `best`, may still replace an ended row."""
        settings = self._settings
        if len(self._ended) < settings.width:
            return True
        if settings.early_stopping is True:
            return False
        longest = settings.early_stopping == "never" and settings.length_penalty > 0
        length = self._max_tokens if longest else count
        return bool(best / length**settings.length_penalty > self._ended[-1].score)


def merged(groups: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[list[int], list[int]]:
    """Join the (sources, targets) of several searches for one copy. Rows that stay in place are left out."""
    pairs = [pair for group in groups for pair in zip(*group, strict=True) if pair[0] != pair[1]]
    return [source for source, _ in pairs], [target for _, target in pairs]
