"""Encodes documents of text to the bytes of their tokens, by the rules of Megatron-LM's tools/preprocess_data.py.

A text is one sequence. A list of texts, or a text split into sentences, is one sequence per item. Sequences without
tokens are left out; documents without tokens are kept. The end-of-document token belongs to the document's last
sequence.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from megaconv.errors import UsageError
from megatron_lite.data.indexed import token_dtype
from megatron_lite.data.indexed_writer import encoded
from megatron_lite.data.sentences import Splitter, lines_of, sentence_splitter
from megatron_lite.data.text_files import Batch
from megatron_lite.data.tokenizer import TokenizerOptions, build_tokenizer
from megatron_lite.data.tokens import TokenDtype


@dataclass(frozen=True)
class EncodingOptions:
    """Options of the tokenization; the fields are flags of preprocess."""

    tokenizer: TokenizerOptions
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    language: str = "english"
    keep_newlines: bool = False
    presplit_sentences: bool = False

    @property
    def in_sentences(self) -> bool:
        """True if each sequence is a sentence."""
        return self.split_sentences or self.presplit_sentences


class Encoded(NamedTuple):
    """An encoded batch. For each key: the bytes of its tokens, and the lengths of each document's sequences."""

    data: list[bytes]
    lengths: list[list[list[int]]]
    bad: list[tuple[int, str]]
    """(record number, error). A bad record is in none of the datasets."""
    records: int
    size: int


class BadRecord(Exception):
    """The error of one record."""


class Encoder:
    """Tokenizes batches of records."""

    def __init__(self, options: EncodingOptions) -> None:
        """Return the tokens of a text.

        Raises BadRecord if the tokenizer refuses the text: invalid numbers, half a surrogate pair.
        """
        self._options = options
        self._tokenizer = build_tokenizer(options.tokenizer)
        self._splitter: Splitter | None = None
        if options.split_sentences:
            self._splitter = sentence_splitter(options.language, options.keep_newlines)
        elif options.presplit_sentences:
            self._splitter = lines_of
        if options.append_eod and self._tokenizer.eod is None:
            raise UsageError(
                "--append-eod: this tokenizer has no token that ends a document; name one as eos_token in its tokenizer_config.json"
            )

    @property
    def dtype(self) -> TokenDtype:
        """Megatron's dtype for the tokenizer's vocabulary."""
        return token_dtype(self._tokenizer.vocab_size)

    def encode(self, batch: Batch) -> Encoded:
        """Return the encoded batch. Bad records are listed, not raised; empty lines are skipped."""
        keys = self._options.keys
        tokens: list[list[int]] = [[] for _ in keys]
        lengths: list[list[list[int]]] = [[] for _ in keys]
        bad: list[tuple[int, str]] = []
        for number, record in enumerate(batch.records, batch.first):
            is_empty_line = isinstance(record, bytes) and not record.strip()
            if is_empty_line:
                continue
            try:
                fields = read_fields(record)
                documents = [self._document(fields, key) for key in keys]
            except BadRecord as error:
                reason = str(error)
                bad.append((number, reason))
                continue
            for place, (ids, counts) in enumerate(documents):
                tokens[place] += ids
                lengths[place].append(counts)
        data = [encoded(ids, self.dtype) for ids in tokens]
        read = len(lengths[0])
        return Encoded(data, lengths, bad, read, batch.size)

    def _document(self, fields: Mapping[str, Any], key: str) -> tuple[list[int], list[int]]:
        """Return (tokens, number of tokens of each sequence)."""
        if key not in fields:
            known = ", ".join(map(repr, fields)) or "nothing"
            raise BadRecord(f"has no {key!r}, only {known}")
        ids: list[int] = []
        counts: list[int] = []
        for sequence in self._sequences(fields[key], key):
            found = self._tokens(sequence, key)
            if found:
                ids += found
                counts.append(len(found))
        eod = self._tokenizer.eod
        if ids and self._options.append_eod and eod is not None:
            ids.append(eod)
            counts[-1] += 1
        return ids, counts

    def _sequences(self, text: Any, key: str) -> list[str]:
        """Return the texts of a field, as sentences if sentences are split."""
        sequences = text if isinstance(text, list) else [text]
        if not all(isinstance(sequence, str) for sequence in sequences):
            raise BadRecord(f"its {key!r} is neither text nor a list of texts")
        if self._splitter is None:
            return sequences
        sentences: list[str] = []
        for sequence in sequences:
            sentences += self._splitter(sequence)
        return sentences

    def _tokens(self, text: str, key: str) -> list[int]:
        """Return the tokens of a text. Raises BadRecord if the tokenizer refuses it: invalid numbers, half a surrogate pair."""
        try:
            found = self._tokenizer.tokenize(text)
        except (ValueError, TypeError) as error:
            why = HALF_CHARACTER if has_half_character(text) else error
            raise BadRecord(f"its {key!r} can't be tokenized: {why}") from error
        wrong = (
            [
                token
                for token in (min(found), max(found))
                if not 0 <= token < self._tokenizer.vocab_size
            ]
            if found
            else []
        )
        if wrong:
            raise BadRecord(
                f"its {key!r} has token {wrong[0]}, the vocabulary {self._tokenizer.vocab_size:,}"
            )
        return found


HALF_CHARACTER = "it has half of a surrogate pair, which is no character"


def has_half_character(value: Any) -> bool:
    """Return whether a text in a value of JSON has half of a surrogate pair. JSON allows it, no tokenizer accepts it."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return True
    return False


def read_fields(record: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a line of JSON, or a row, by field. Raises BadRecord."""
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
    """Return the process's encoder for these options."""
    return Encoder(options)


def encode(options: EncodingOptions, batch: Batch) -> Encoded:
    """Encode a batch; the job of a worker process."""
    return encoder(options).encode(batch)
