"""Small indexed datasets, and megatron-core's reading of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.indexed import DTYPES, token_dtype
from megatron_lite.data.indexed_writer import IndexedWriter

VOCAB = 1000
"""The vocabulary of the null tokenizers below. Their end of document is 1000, so they have 1001 tokens."""


def write_corpus(
    prefix: Path, lengths: Iterable[int], *, vocab: int = VOCAB, seed: int = 0
) -> Path:
    """One sequence a document, random tokens, every third document with an end in its midst."""
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, token_dtype(vocab)) as writer:
        for number, length in enumerate(lengths):
            tokens = random.integers(0, vocab, length)
            if number % 3 == 0 and length:
                tokens[length // 2] = vocab
            writer.add(tokens, [length])
    return prefix


def write_documents(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], code: int = 8, modes: bool = False
) -> Path:
    """documents[k][i] is sequence i of document k; its mode is i."""
    with IndexedWriter(prefix, DTYPES[code], modes=modes) as writer:
        for sequences in documents:
            flat = [token for sequence in sequences for token in sequence]
            writer.add(
                flat,
                [len(sequence) for sequence in sequences],
                list(range(len(sequences))) if modes else None,
            )
    return prefix


def some_lengths(count: int, longest: int, seed: int) -> list[int]:
    """Lengths of documents. Some have no tokens, like an empty line of text."""
    random = np.random.default_rng(seed)
    lengths: NDArray[Any] = random.integers(1, longest, count)
    lengths[random.random(count) < 0.05] = 0
    return [int(length) for length in lengths]
