"""Samples of the inverse cloze task: a sentence as the query, its block with the title as the context.

Given the same draws, the arrays are those of Megatron-LM's ICTDataset (core_v0.9.0). Megatron draws from one generator of
a process, so its samples depend on the number of workers. Here, the draws follow from the seed and the sample's number.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.blocks.mapping import ENDS

Ids = NDArray[np.int64]


class Special(NamedTuple):
    """Special tokens."""

    cls: int
    sep: int
    pad: int


class Draw(NamedTuple):
    """The random choices of a sample."""

    sentence: int
    """Number of the query's sentence in its block."""
    keeps: bool
    """True if the sentence also stays in the block."""


class Sample(NamedTuple):
    """Tokens of a query and its context, each int64 [seq_length], padded at the end."""

    query: Ids
    context: Ids


def draw(sentences: int, keep_probability: float, seed: int, number: int) -> Draw:
    """Return the choices of sample `number`. keep_probability: Megatron's --query-in-block-prob."""
    random = np.random.RandomState((seed + number) % 2**32)
    sentence = int(random.randint(sentences))
    return Draw(sentence, bool(random.random_sample() < keep_probability))


def ict_sample(
    sentences: Sequence[Sequence[int]],
    title: Sequence[int],
    drawn: Draw,
    seq_length: int,
    special: Special,
) -> Sample:
    """Return the sample of a block. sentences: tokens of each. title: shorter than seq_length - 2."""
    query = sentences[drawn.sentence]
    rest = [
        token
        for number, sentence in enumerate(sentences)
        if drawn.keeps or number != drawn.sentence
        for token in sentence
    ]
    asked = [special.cls, *query[: seq_length - 2], special.sep]
    return Sample(
        _padded(asked, seq_length, special.pad), block_with_title(rest, title, seq_length, special)
    )


def block_with_title(
    block: Sequence[int], title: Sequence[int], seq_length: int, special: Special
) -> Ids:
    """Return int64 [seq_length]: [CLS] title [SEP] block [SEP], the block truncated, and padding."""
    room = seq_length - ENDS - len(title)
    tokens = [special.cls, *title, special.sep, *block[:room], special.sep]
    return _padded(tokens, seq_length, special.pad)


def _padded(tokens: Sequence[int], seq_length: int, pad: int) -> Ids:
    return np.array([*tokens, *[pad] * (seq_length - len(tokens))], np.int64)
