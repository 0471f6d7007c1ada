"""Samples of tokens for a calibration, from chats or from an indexed dataset."""

from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.finetuning.examples import ReadingOptions, read_examples
from megatron_lite.data.indexed import IndexedDataset, idx_path
from megatron_lite.data.tokenizer import Tokenizer

Sample = NDArray[np.int64]
"""Tokens of one row."""


def read_samples(
    words: Sequence[str], tokenizer: Tokenizer, most: int, length: int, template: str | None = None
) -> list[Sample]:
    """Return at most `most` samples of at most `length` tokens, in the order of the data.

    template: the chat template in place of the tokenizer's own.
    A document or chat gives its beginning. If all of them are fewer than `most`, documents give their next parts too.
    Raises UsageError for numbers below 1, CorruptCheckpoint for data without a sample.
    """
    if most < 1 or length < 2:
        raise UsageError("--samples takes 1 or more, --seq-length 2 or more")
    indexed = [word for word in words if idx_path(word).is_file()]
    if indexed and len(indexed) < len(words):
        raise UsageError(
            "--data takes chats or indexed datasets, not both; calibrate with one kind"
        )
    found = (
        _of_datasets(indexed, length) if indexed else _of_chats(words, tokenizer, length, template)
    )
    samples = list(islice(found, most))
    if not samples:
        raise CorruptCheckpoint(f"{', '.join(words)}: has no document of 2 tokens or more")
    return samples


def require_known(samples: list[Sample], vocab: int) -> list[Sample]:
    """Return the samples. Raises UsageError for a token outside the model's vocabulary."""
    largest = max(int(sample.max()) for sample in samples)
    if largest >= vocab or min(int(sample.min()) for sample in samples) < 0:
        raise UsageError(
            f"--data: token {largest} is outside the model's vocabulary of {vocab}; use data of the model's own tokenizer"
        )
    return samples


def _of_chats(
    words: Sequence[str], tokenizer: Tokenizer, length: int, template: str | None
) -> Iterator[Sample]:
    options = ReadingOptions(chat_template=template)
    examples = read_examples(words, tokenizer, options, flag="--data")
    for first, last in zip(examples.bounds[:-1], examples.bounds[1:], strict=True):
        if last - first > 1:
            yield examples.tokens[first : min(last, first + length)].astype(np.int64)


def _of_datasets(prefixes: Sequence[str], length: int) -> Iterator[Sample]:
    """Yield the first parts of all documents, then their second parts, and so on."""
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    for part in count():
        is_over = True
        for dataset in datasets:
            for sample in _parts(dataset, part * length, length):
                is_over = False
                yield sample
        if is_over:
            return


def _parts(dataset: IndexedDataset, start: int, length: int) -> Iterator[Sample]:
    """Yield tokens [start, start + length) of each document that has two or more there."""
    lengths = dataset.lengths.astype(np.int64)
    for first, last in zip(dataset.documents[:-1], dataset.documents[1:], strict=True):
        if int(lengths[first:last].sum()) < start + 2:
            continue
        sentences = [dataset.get(number) for number in range(int(first), int(last))]
        whole = np.concatenate(sentences).astype(np.int64)
        yield whole[start : start + length]
