"""`evaluate --corpus`: loss of a large corpus, and perplexity by token, byte and word.

Documents follow each other, each with the end-of-document token behind it. This token is predicted too. Every token is
predicted once. The corpus is read as a stream, so it may be larger than the memory.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.finetuning.records import find_files
from megatron_lite.data.indexed import IndexedDataset, idx_path
from megatron_lite.data.recipes.documents import Reader
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.inference.evaluation.windows import (
    ROWS,
    grouped,
    log_prob_sum,
    stream_windows,
)
from megatron_lite.inference.prompts import tokens_of
from megatron_lite.inference.slots import LanguageModel


@dataclass(frozen=True)
class Source:
    """A file with texts, or the prefix of an indexed dataset."""

    path: str
    indexed: bool


@dataclass(frozen=True)
class Entry:
    """A document of the corpus."""

    tokens: list[int]
    """Without the end-of-document token."""
    text: str


@dataclass
class Size:
    """The part of the corpus that was read."""

    documents: int = 0
    tokens: int = 0
    """With an end-of-document token for each document."""
    bytes: int = 0
    words: int = 0
    """Words between white space."""

    def add(self, entry: Entry) -> None:
        """Count one more document."""
        self.documents += 1
        self.tokens += len(entry.tokens) + 1
        self.bytes += len(entry.text.encode())
        self.words += len(entry.text.split())


def find_sources(words: Sequence[str]) -> list[Source]:
    """Return the sources that --corpus names. Raises UsageError for a missing file."""
    found: list[Source] = []
    for word in words:
        if idx_path(word).is_file():
            found.append(Source(word, indexed=True))
        else:
            found += [Source(file, indexed=False) for file in find_files([word], "--corpus")]
    return found


def entries_of(sources: Sequence[Source], reader: Reader, tokenizer: Tokenizer) -> Iterator[Entry]:
    """Yield all documents, in order. Raises CorruptCheckpoint with the file."""
    for source in sources:
        if source.indexed:
            yield from _indexed(source.path, tokenizer)
            continue
        for document in reader.documents(source.path):
            try:
                tokens = tokens_of(tokenizer, document.text)
            except UsageError as error:
                raise CorruptCheckpoint(f"{document.where}: {error}") from error
            yield Entry(tokens, document.text)


def _indexed(prefix: str, tokenizer: Tokenizer) -> Iterator[Entry]:
    data = IndexedDataset(Path(prefix))
    for number in range(len(data.documents) - 1):
        first, behind = int(data.documents[number]), int(data.documents[number + 1])
        sequences = [data.get(sequence) for sequence in range(first, behind)]
        tokens: list[int] = np.concatenate(sequences).tolist() if sequences else []
        if tokens and tokens[-1] == tokenizer.eod:
            tokens.pop()
        yield Entry(tokens, tokenizer.detokenize(tokens))


def perplexity(
    model: LanguageModel,
    tokenizer: Tokenizer,
    entries: Iterable[Entry],
    length: int,
    stride: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Return loss, perplexities and sizes of a corpus.

    length: tokens of a window. stride: tokens between two windows (length). limit: the document that reaches this
    number of tokens is the last one. The begin token of the model, if it has one, stands before the first document.
    Raises UsageError, CorruptCheckpoint, NotFinite.
    """
    require_window(length, stride)
    size = Size()
    documents = _token_stream(entries, end_of_document(tokenizer), size, limit)
    windows = stream_windows(
        chain([tokenizer.begin], documents), length, length if stride is None else stride
    )
    total, predicted = 0.0, 0
    for group in grouped(windows, max(ROWS, 4 * model.slots)):
        total -= log_prob_sum(model, group)
        predicted += sum(window.counted for window in group)
    if not predicted:
        raise CorruptCheckpoint("--corpus: the files have no tokens to predict")
    return _measures(total, predicted, size)


def end_of_document(tokenizer: Tokenizer) -> int:
    """Return the token behind each document. Raises UsageError if the tokenizer has none."""
    if tokenizer.eod is None:
        raise UsageError(
            "--corpus: the tokenizer has no end-of-document token; choose another with --tokenizer-model"
        )
    return tokenizer.eod


def require_window(length: int, stride: int | None = None) -> None:
    """Raise UsageError for a window without tokens, or for a stride that leaves tokens out."""
    if length < 1:
        raise UsageError(f"--seq-length {length} must be 1 or more")
    if stride is not None and not 0 < stride <= length:
        raise UsageError(
            f"--overlapping-eval {stride} must be between 1 and the sequence length, {length}"
        )


def _token_stream(
    entries: Iterable[Entry], eod: int, size: Size, limit: int | None
) -> Iterator[list[int]]:
    """Yield the tokens of each document with the end of document, and count them in `size`."""
    for entry in entries:
        size.add(entry)
        yield [*entry.tokens, eod]
        if limit is not None and size.tokens >= limit:
            return


def _measures(total: float, predicted: int, size: Size) -> dict[str, Any]:
    """total: the sum of all losses, in nats."""
    by_byte = _ratio(total, size.bytes)
    return {
        "loss": total / predicted,
        "perplexity": exponential(total / predicted),
        "bits_per_byte": None if by_byte is None else by_byte / math.log(2),
        "byte_perplexity": exponential(by_byte),
        "word_perplexity": exponential(_ratio(total, size.words)),
        "tokens_per_word": _ratio(size.tokens, size.words),
        "documents": size.documents,
        "tokens": size.tokens,
        "predicted_tokens": predicted,
        "bytes": size.bytes,
        "words": size.words,
    }


def _ratio(value: float, count: int) -> float | None:
    return value / count if count else None


def exponential(value: float | None) -> float | None:
    """Return e^value; None if it is too large for a float, as with texts that have no white space."""
    try:
        return None if value is None else math.exp(value)
    except OverflowError:
        return None
