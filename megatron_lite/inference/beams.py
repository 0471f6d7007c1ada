"""Beam search as transformers has it: scores, what counts as ended, and when to stop are those of its `generate`.

A search has no model: it takes the logits behind its rows and says which rows there are next, so that a running batch (batching.py) can
compute the rows of many searches together with everything else.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beam:
    """A row, and the sum of the log-probabilities of its generated tokens, once ended divided by their number ** penalty."""

    tokens: tuple[int, ...]
    """Generated ones."""
    score: float


class Search(Protocol):
    """One search while it goes on."""

    rows: list[tuple[int, ...]]
    """The generated tokens of those that are open; at the start one without any."""

    def take(self, logits: Tensor) -> list[int]:
        """Which of the rows so far each of the new ones continues; none at the end. logits: float32 [rows, vocabulary]."""
        ...

    def found(self) -> list[Beam]:
        """Best first, at the end."""
        ...


class BeamRules(Protocol):
    @property
    def width(self) -> int:
        """The most open rows."""
        ...

    def search(self, max_tokens: int, stop_ids: Collection[int]) -> Search: ...


@dataclass(frozen=True)
class BeamSettings:
    """Rules of transformers: `width` ended rows are found."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    """True: end with the first `width` rows that ended; False: when none can become better at its present length; `never`: at any."""

    def search(self, max_tokens: int, stop_ids: Collection[int]) -> Search:
        return _Search(self, max_tokens, stop_ids)


class _Search:
    def __init__(self, settings: BeamSettings, max_tokens: int, stop_ids: Collection[int]) -> None:
        self._settings, self._max_tokens, self._stop_ids = settings, max_tokens, stop_ids
        self.rows: list[tuple[int, ...]] = [()]
        self._scores = torch.zeros(1)
        self._ended: list[Beam] = []

    def take(self, logits: Tensor) -> list[int]:
        width, count = self._settings.width, len(self.rows[0]) + 1
        best, beams, tokens = self._candidates(logits)
        stops = [count == self._max_tokens or token in self._stop_ids for token in tokens]
        for score, beam, token, stop in list(zip(best.tolist(), beams, tokens, stops, strict=True))[:width]:
            if stop:
                ended = Beam((*self.rows[beam], token), score / count**self._settings.length_penalty)
                self._ended = sorted([*self._ended, ended], key=lambda beam: -beam.score)
        self._ended = self._ended[:width]
        going = [number for number, stop in enumerate(stops) if not stop][:width]
        if not going or not self._can_improve(float(best[going[0]]), count):
            return []
        self.rows = [(*self.rows[beams[number]], tokens[number]) for number in going]
        self._scores = best[going]
        return [beams[number] for number in going]

    def found(self) -> list[Beam]:
        return self._ended

    def _candidates(self, logits: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """(scores, rows, tokens) of the best continuations: so many that `width` of them don't end."""
        sums = (logits.log_softmax(-1) + self._scores.unsqueeze(1)).flatten()
        wanted = max(2, 1 + len(self._stop_ids)) * self._settings.width
        best = sums.topk(min(wanted, len(sums)))
        vocab = logits.shape[-1]
        return best.values, (best.indices // vocab).tolist(), (best.indices % vocab).tolist()

    def _can_improve(self, best: float, count: int) -> bool:
        """Whether the best open row may still push one out. best: its score."""
        settings = self._settings
        if len(self._ended) < settings.width:
            return True
        if settings.early_stopping is True:
            return False
        longest = settings.early_stopping == "never" and settings.length_penalty > 0
        length = self._max_tokens if longest else count
        return bool(best / length**settings.length_penalty > self._ended[-1].score)


def merged(groups: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[list[int], list[int]]:
    """(sources, targets) of several searches as those of one copy, without what stays where it is."""
    pairs = [pair for group in groups for pair in zip(*group, strict=True) if pair[0] != pair[1]]
    return [source for source, _ in pairs], [target for _, target in pairs]
