"""What generation asks of a model: rows of tokens that grow, each in a slot. How logits come about is the model's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megaconv.errors import CheckpointError


@dataclass(frozen=True)
class Feed:
    """Tokens behind those that a slot has already."""

    slot: int
    start: int
    """How many tokens of the slot are kept; 0 begins a new row."""
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """Of each token of a row behind its first one, given those before it. Log-probabilities are of the raw logits."""

    log_probs: Tensor
    """float32 [tokens - 1]"""
    greedy: Tensor
    """bool [tokens - 1]: whether the token is the likeliest."""
    top_ids: Tensor
    """int64 [tokens - 1, n]: the likeliest tokens."""
    top_log_probs: Tensor
    """float32 [tokens - 1, n]"""


class NotFinite(CheckpointError):
    """Logits that are NaN or infinite: no token follows from them."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are NaN or infinite here, so that no token follows: its weights are damaged, or too large for "
            "what it is computed in (--dtype fp32)"
        )


def sound(logits: Tensor) -> list[bool]:
    """Of each row of [rows, vocabulary], whether a token follows from it."""
    found: list[bool] = logits.amax(-1).isfinite().tolist()  # which is NaN, or infinite, if one of them is
    return found


def require_finite(scored: Scored) -> Scored:
    """Raises NotFinite."""
    if not bool(scored.log_probs.isfinite().all()):
        raise NotFinite
    return scored


class LanguageModel(Protocol):
    @property
    def slots(self) -> int:
        """How many rows it has room for."""
        ...

    @property
    def length(self) -> int:
        """The longest row."""
        ...

    def extend(self, feeds: Sequence[Feed]) -> Tensor:
        """Logits behind the last token of each, float32 [feeds, vocabulary] on the CPU. Each feed has a slot of its own."""
        ...

    @property
    def copied(self) -> Sequence[int]:
        """The slots among which rows can be copied."""
        ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Every target gets the row that its source had before any of them changed. All are of `copied`."""
        ...

    def forget(self, slots: Sequence[int]) -> None:
        """Leaves nothing of their rows."""
        ...

    def score(self, rows: Sequence[Sequence[int]], top: int = 0) -> list[Scored]:
        """top: how many of the likeliest tokens come along. Touches no slot."""
        ...


AllLogits = Callable[[Sequence[Sequence[int]]], list[Tensor]]
"""Rows of tokens -> for each the logits behind all of them, float32 [tokens, vocabulary]."""


class Recomputed:
    """A model without a cache: whole rows are computed each time."""

    def __init__(self, logits: AllLogits, slots: int, length: int) -> None:
        self.slots, self.length, self._logits = slots, length, logits
        self.copied = range(slots)
        self._rows: list[list[int]] = [[] for _ in range(slots)]

    def extend(self, feeds: Sequence[Feed]) -> Tensor:
        for feed in feeds:
            self._rows[feed.slot] = [*self._rows[feed.slot][: feed.start], *feed.tokens]
        return torch.stack([logits[-1] for logits in self._logits([self._rows[feed.slot] for feed in feeds])])

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        rows = [list(self._rows[source]) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            self._rows[target] = row

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._rows[slot] = []

    def score(self, rows: Sequence[Sequence[int]], top: int = 0) -> list[Scored]:
        return [
            judge(logits[:-1], torch.tensor(row[1:]), top) for row, logits in zip(rows, self._logits(rows), strict=True)
        ]


def judge(logits: Tensor, tokens: Tensor, top: int) -> Scored:
    """logits float32 [tokens, vocabulary], of which each row predicts one of the tokens."""
    log_probs = logits.log_softmax(-1)
    best = log_probs.topk(max(top, 1), -1)
    picked = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Scored(picked, best.indices[:, 0] == tokens, best.indices[:, :top], best.values[:, :top])
