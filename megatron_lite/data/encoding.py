"""Documents of text to the bytes of their tokens, by the rules of Megatron-LM's tools/preprocess_data.py.

A text is one sequence, a list of texts or a text split into sentences one sequence each. Sequences without tokens are left out,
documents without are kept. The end of a document belongs to its last sequence.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from megaconv.errors import UsageError
from megatron_lite.data.indexed import token_dtype
from megatron_lite.data.indexed_writer import encoded
from megatron_lite.data.sentences import Splitter, sentence_splitter
from megatron_lite.data.text_files import Batch
from megatron_lite.data.tokenizer import TokenizerOptions, build_tokenizer
from megatron_lite.data.tokens import TokenDtype


@dataclass(frozen=True)
class EncodingOptions:
    tokenizer: TokenizerOptions
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    language: str = "english"
    keep_newlines: bool = False


class Encoded(NamedTuple):
    """A batch, for each key: the bytes of its tokens, and the lengths of each document's sequences."""

    data: list[bytes]
    lengths: list[list[list[int]]]
    bad: list[tuple[int, str]]
    """(number of a record, what is wrong with it); it is in none of the datasets."""
    records: int
    size: int


class BadRecord(Exception):
    """What is wrong with one."""


class Encoder:
    def __init__(self, options: EncodingOptions) -> None:
        """Raises UsageError and CorruptCheckpoint as build_tokenizer does."""
        self._options = options
        self._tokenizer = build_tokenizer(options.tokenizer)
        self._splitter: Splitter | None = None
        if options.split_sentences:
            self._splitter = sentence_splitter(options.language, options.keep_newlines)
        if options.append_eod and self._tokenizer.eod is None:
            raise UsageError("--append-eod: this tokenizer has no token that ends a document")

    @property
    def dtype(self) -> TokenDtype:
        return token_dtype(self._tokenizer.vocab_size)

    def encode(self, batch: Batch) -> Encoded:
        keys = self._options.keys
        tokens: list[list[int]] = [[] for _ in keys]
        lengths: list[list[list[int]]] = [[] for _ in keys]
        bad: list[tuple[int, str]] = []
        for number, record in enumerate(batch.records, batch.first):
            if isinstance(record, bytes) and not record.strip():
                continue
            try:
                fields = read_fields(record)
                documents = [self._document(fields, key) for key in keys]
            except BadRecord as error:
                bad.append((number, str(error)))
                continue
            for place, (ids, counts) in enumerate(documents):
                tokens[place] += ids
                lengths[place].append(counts)
        data = [encoded(ids, self.dtype) for ids in tokens]
        return Encoded(data, lengths, bad, len(lengths[0]), batch.size)

    def _document(self, fields: Mapping[str, Any], key: str) -> tuple[list[int], list[int]]:
        """(tokens, how many each sequence has)."""
        if key not in fields:
            raise BadRecord(f"has no {key!r}, only {', '.join(map(repr, fields)) or 'nothing'}")
        text = fields[key]
        sequences = text if isinstance(text, list) else [text]
        if not all(isinstance(sequence, str) for sequence in sequences):
            raise BadRecord(f"its {key!r} is neither text nor a list of texts")
        if self._splitter is not None:
            sequences = [sentence for sequence in sequences for sentence in self._splitter(sequence)]
        ids: list[int] = []
        counts: list[int] = []
        for sequence in sequences:
            found = self._tokens(sequence, key)
            if found:
                ids += found
                counts.append(len(found))
        if ids and self._options.append_eod and self._tokenizer.eod is not None:
            ids.append(self._tokenizer.eod)
            counts[-1] += 1
        return ids, counts

    def _tokens(self, text: str, key: str) -> list[int]:
        """A tokenizer may refuse a text: numbers that are none, half a surrogate pair."""
        try:
            found = self._tokenizer.tokenize(text)
        except (ValueError, TypeError) as error:
            raise BadRecord(f"its {key!r} can't be tokenized: {error}") from error
        wrong = (
            [token for token in (min(found), max(found)) if not 0 <= token < self._tokenizer.vocab_size]
            if found
            else []
        )
        if wrong:
            raise BadRecord(f"its {key!r} has token {wrong[0]}, the vocabulary {self._tokenizer.vocab_size:,}")
        return found


def read_fields(record: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    """A line of JSON or a row, by field. Raises BadRecord."""
    if isinstance(record, Mapping):
        return record
    try:
        fields = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRecord("is not a JSON object")
    return fields


@cache
def encoder(options: EncodingOptions) -> Encoder:
    """One for each process."""
    return Encoder(options)


def encode(options: EncodingOptions, batch: Batch) -> Encoded:
    """What a worker process is asked to do."""
    return encoder(options).encode(batch)
