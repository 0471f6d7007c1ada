"""Embeds by a biencoder: its query tower and its context tower, which take rows of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.blocks.samples import Special
from megatron_lite.data.blocks.special import special_tokens
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.retrieval.embedder import Passage, Vectors

Ids = NDArray[np.int64]


class Towers(Protocol):
    """A biencoder on this process. Rows are int64 [rows, tokens]; 0 is padding, which nothing attends to. All types are 0."""

    width: int
    fingerprint: str
    tokenizer: Tokenizer
    seq_length: int
    """The most tokens of a row."""

    def query(self, ids: Ids) -> Vectors:
        """Return the vectors of questions."""
        ...

    def context(self, ids: Ids) -> Vectors:
        """Return the vectors of passages."""
        ...


@dataclass
class TowerEmbedder:
    """See embedder.Embedder. batch: rows at once."""

    towers: Towers
    name: str
    seq_length: int
    query_length: int
    batch: int

    def __post_init__(self) -> None:
        self._special = special_tokens(self.towers.tokenizer)

    @property
    def width(self) -> int:
        return self.towers.width

    @property
    def fingerprint(self) -> str:
        return self.towers.fingerprint

    def passages(self, rows: Sequence[Passage]) -> Vectors:
        ids = [self._passage(row) for row in rows]
        return self._in_batches(self.towers.context, ids)

    def queries(self, texts: Sequence[str]) -> Vectors:
        tokenize = self.towers.tokenizer.tokenize
        ids = [question_row(tokenize(text), self.query_length, self._special) for text in texts]
        return self._in_batches(self.towers.query, ids)

    def _passage(self, row: Passage) -> Ids:
        if row.tokens is not None:
            return row.tokens
        tokenize = self.towers.tokenizer.tokenize
        title, text = tokenize(row.title), tokenize(row.text)
        return passage_row(title, text, self.seq_length, self._special)

    def _in_batches(self, tower: "TowerCall", ids: list[Ids]) -> Vectors:
        vectors = np.empty((len(ids), self.width), np.float32)
        for first in range(0, len(ids), self.batch):
            rows = ids[first : first + self.batch]
            # Rows are padded to the longest one, so that short questions take less time.
            longest = max(int(np.count_nonzero(row)) for row in rows)
            padded = np.zeros((len(rows), longest), np.int64)
            for number, row in enumerate(rows):
                padded[number, : min(longest, len(row))] = row[:longest]
            vectors[first : first + len(rows)] = tower(padded)
        return vectors


class TowerCall(Protocol):
    """One of the two towers."""

    def __call__(self, ids: Ids) -> Vectors: ...


def question_row(tokens: Sequence[int], length: int, special: Special) -> Ids:
    """Return int64 [length]: [CLS] question [SEP], and padding."""
    return _padded([special.cls, *tokens[: length - 2], special.sep], length, special.pad)


def passage_row(title: Sequence[int], text: Sequence[int], length: int, special: Special) -> Ids:
    """Return int64 [length]: [CLS] title [SEP] text, truncated, then [SEP] and padding."""
    tokens = [special.cls, *title, special.sep, *text]
    return _padded([*tokens[: length - 1], special.sep], length, special.pad)


def _padded(tokens: list[int], length: int, pad: int) -> Ids:
    return np.array([*tokens, *[pad] * (length - len(tokens))], np.int64)
