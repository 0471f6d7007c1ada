"""Divides documents into blocks of consecutive sentences.

Equal to build_blocks_mapping of megatron-core's native helper (megatron/core/datasets/helpers.cpp). One difference:
Megatron looks up titles by the document's number in its part of the split, in the titles of the whole corpus. So its
samples for validation and test have titles of other documents. Here, the caller passes the titles of the same documents.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.masked.mapping import LONG_SENTENCE, shuffled_order

ENDS = 3
"""Special tokens of a block with its title: [CLS] title [SEP] block [SEP]."""


@dataclass(frozen=True)
class Corpus:
    """The sentences and titles of a part of a corpus."""

    documents: NDArray[np.int64]
    """The first sentence of each document, and the end of the last document."""
    lengths: NDArray[np.int32]
    """Tokens of every sentence of the whole corpus."""
    title_lengths: Sequence[int]
    """Tokens of the title of each document in `documents`."""
    first_document: int = 0
    """Number of the first document in the whole corpus."""


def build_blocks(
    corpus: Corpus, samples: int | None, seq_length: int, seed: int, least_sentences: int = 2
) -> NDArray[np.int64]:
    """Return int64 [n, 4] in random order: first sentence, end, document, and number of the block in its epoch.

    samples: the least number, rounded up to whole epochs; None: one epoch. least_sentences: of a block, and of a document;
    Megatron has 1 with --use-one-sent-docs. Documents with a sentence of more than 512 tokens are left out.
    """
    epoch = list(_epoch(corpus, seq_length, least_sentences))
    numbered = [(*block, number) for number, block in enumerate(epoch)]
    wanted = len(numbered) if samples is None else samples
    epochs = max(1, -(-wanted // len(numbered))) if numbered else 0
    mapping = np.array(numbered * epochs, np.int64).reshape(-1, 4)
    return mapping[shuffled_order(len(mapping), seed + 1)]


def _epoch(corpus: Corpus, seq_length: int, least: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first sentence, end, document) of each block."""
    sizes = corpus.lengths.tolist()
    for number, (first, last) in enumerate(pairwise(corpus.documents.tolist())):
        too_long = any(size > LONG_SENTENCE for size in sizes[first:last])
        if last - first < least or too_long:
            continue
        room = seq_length - ENDS - corpus.title_lengths[number]
        for start, end in _blocks(sizes, first, last, room, least):
            yield start, end, corpus.first_document + number


def _blocks(
    sizes: list[int], first: int, last: int, room: int, least: int
) -> Iterator[tuple[int, int]]:
    """Yield (first sentence, end) of the blocks of a document."""
    start, length = first, 0
    for sentence in range(first, last):
        length += sizes[sentence]
        end = sentence + 1
        full = length >= room and last - end >= least and end - start >= least
        if full or end == last:
            yield start, end
            start, length = end, 0
