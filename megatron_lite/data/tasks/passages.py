"""Questions with passages in the form of DPR's files, and the samples of Megatron's task RET-FINETUNE-NQ.

A file is a JSON list of {question, answers, positive_ctxs, negative_ctxs, hard_negative_ctxs}; a passage is {title, text}.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megatron_lite.data.blocks.samples import Special
from megatron_lite.data.text_files import read_whole

Ids = NDArray[np.int64]


class Passage(NamedTuple):
    """A text with its title."""

    title: str
    text: str


class Question(NamedTuple):
    """A question, the passage that answers it, and others that don't."""

    text: str
    positive: Passage
    hard: tuple[Passage, ...]
    others: tuple[Passage, ...]


class PassageSample(NamedTuple):
    """query: [length]. contexts: [most, length]: the positive one, then negatives, then rows of padding."""

    query: Ids
    contexts: Ids
    passages: int
    """The number of contexts that are no padding."""


def read_questions(path: str) -> list[Question]:
    """Return the questions of a file. Raises CorruptCheckpoint with the row for bad content."""
    try:
        rows = json.loads(read_whole(path))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise CorruptCheckpoint(f"{path}: should be a list of questions, as DPR's files are")
    return [_question(row, f"{path}: row {number}") for number, row in enumerate(rows)]


def _question(row: Any, where: str) -> Question:
    text = row.get("question") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise CorruptCheckpoint(f"{where}: has no question")
    positives = _passages(row, "positive_ctxs", where)
    if not positives:
        raise CorruptCheckpoint(f"{where}: has no positive_ctxs; a question needs its passage")
    return Question(
        text.removesuffix("?"),
        positives[0],
        _passages(row, "hard_negative_ctxs", where),
        _passages(row, "negative_ctxs", where),
    )


def _passages(row: dict[str, Any], key: str, where: str) -> tuple[Passage, ...]:
    listed = row.get(key) or []
    try:
        return tuple(Passage(str(each["title"]), str(each["text"])) for each in listed)
    except (TypeError, KeyError) as error:
        raise CorruptCheckpoint(
            f"{where}: {key} should be a list of passages with title and text"
        ) from error


@dataclass(frozen=True)
class PassageDataset:
    """Samples of questions. Thread-safe: reading changes nothing."""

    questions: Sequence[Question]
    order: NDArray[np.int64]
    """The number of each sample's question."""
    tokenize: Callable[[str], Sequence[int]]
    special: Special
    length: int
    hard: int
    """Hard negatives of a sample."""
    others: int = 0
    """Other negatives of a sample without `fills`."""
    seed: int | None = None
    """Seed of the choice among hard negatives; None: the first ones, in the file's order."""
    fills: bool = True
    """True if other negatives take the place of missing hard ones."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> PassageSample:
        number = int(self.order[index])
        question = self.questions[number]
        negatives = self._negatives(question, index)
        passages = [question.positive, *negatives]
        rows = [self._row(self._passage(passage)) for passage in passages]
        most = 1 + self.hard + self.others
        padding = [self._row([])] * (most - len(rows))
        query = self._row(self._query(question.text))
        return PassageSample(query, np.stack([*rows, *padding]), len(passages))

    def _row(self, tokens: list[int]) -> Ids:
        """Return the tokens with padding behind, [length]."""
        row = np.full(self.length, self.special.pad, np.int64)
        row[: len(tokens)] = tokens
        return row

    def _query(self, text: str) -> list[int]:
        tokens = self.tokenize(text)[: self.length - 2]
        return [self.special.cls, *tokens, self.special.sep]

    def _negatives(self, question: Question, index: int) -> list[Passage]:
        hard = list(question.hard)
        if self.seed is not None:
            random = np.random.RandomState((self.seed + index) % 2**32)
            hard = [hard[number] for number in random.permutation(len(hard))]
        chosen = hard[: self.hard]
        if not self.fills:  # Megatron's order in evaluations
            return [*question.others[: self.others], *chosen]
        missing = self.hard - len(chosen)
        return [*chosen, *question.others[:missing]]

    def _passage(self, passage: Passage) -> list[int]:
        special = self.special
        title, text = self.tokenize(passage.title), self.tokenize(passage.text)
        tokens = [special.cls, *title, special.sep, *text]
        return [*tokens[: self.length - 1], special.sep]
