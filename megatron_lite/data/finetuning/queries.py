"""Queries with documents that answer them, and others that don't: the records from which an embedding model learns.

| query | documents that answer it | other documents | by |
|---|---|---|---|
| `query`, `anchor`, `question` | `positive`, `answer`, `document`, `passage` | `negative`, `negative_1`, ... | sentence-transformers |
| `query` | `pos`, a list | `neg`, a list; `prompt` or `instruction` before the query | FlagEmbedding |
| `query` | `positive_passages`, of {title, text} | `negative_passages` | Tevatron |

Each of these fields may be a text or a list. A document may be an object with a `title` and a `text`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.embedding_form import DOCUMENT, QUERY, EmbeddingForm, text_tokens
from megatron_lite.data.encoding import (
    HALF_CHARACTER,
    BadRecord,
    has_half_character,
    read_fields,
)
from megatron_lite.data.finetuning.forms import listed
from megatron_lite.data.finetuning.records import Record, find_files, read_records
from megatron_lite.data.tokenizer import Tokenizer

_QUERIES = ("query", "anchor", "question")
_ANSWERS = ("positive", "positives", "pos", "positive_passages", "answer", "document", "passage")
_OTHERS = ("negative", "negatives", "neg", "negative_passages")
_NUMBERED = re.compile(r"negative_\d+")
_PROMPTS = ("prompt", "instruction")


class QueryRecord(NamedTuple):
    """A query and its documents."""

    query: str
    prompt: str | None
    """The text before the query; None: that of all queries."""
    answers: Sequence[str]
    """The documents that answer it, at least one."""
    others: Sequence[str]
    """The documents that don't: its hard negatives."""
    unread: frozenset[str]
    """Fields that are not content."""


def read_query(record: Mapping[str, Any]) -> QueryRecord:
    """Read a record. Raises BadRecord with the field's name for any other record."""
    there = {name: value for name, value in record.items() if value is not None}
    query = _one_of(_QUERIES, there, "query")
    answer = _one_of(_ANSWERS, there, "document that answers its query")
    others = [name for name in there if name in _OTHERS or _NUMBERED.fullmatch(name)]
    prompts = [name for name in _PROMPTS if name in there]
    found = QueryRecord(
        _text(there[query], query),
        _text(there[prompts[0]], prompts[0], empty=True) if prompts else None,
        _documents(there, [answer]),
        _documents(there, others),
        frozenset(there) - {query, answer, *others, *prompts[:1]},
    )
    if not found.answers:
        raise BadRecord(f'its "{answer}" is an empty list')
    return found


def _one_of(names: Sequence[str], record: Mapping[str, Any], what: str) -> str:
    """Return the one of these fields that the record has. Raises BadRecord if it has none, or several."""
    found = [name for name in names if name in record]
    if not found:
        raise BadRecord(
            f"has {listed(record) or 'no fields'}, but no {what}: one of {listed(names)}"
        )
    if len(found) > 1:
        raise BadRecord(f"has {listed(found)}; only one of them can be the {what}")
    return found[0]


def _documents(record: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the documents in these fields. Raises BadRecord."""
    found = []
    for name in names:
        value = record[name]
        for item in value if isinstance(value, list) else [value]:
            found.append(_document(item, name))
    return found


def _document(value: Any, name: str) -> str:
    """Return the text of a document, with its title before it. Raises BadRecord."""
    if not isinstance(value, Mapping):
        return _text(value, name)
    title = value.get("title") or ""
    text = _text(value.get("text"), f"{name}.text")
    return f"{_text(title, f'{name}.title')} {text}" if title else text


def _text(value: Any, name: str, *, empty: bool = False) -> str:
    """Return a text. Raises BadRecord for anything else, and for an empty one."""
    if not isinstance(value, str):
        raise BadRecord(f'its "{name}" should be text, found {value!r:.40}')
    if not value and not empty:
        raise BadRecord(f'its "{name}" is empty')
    return value


@dataclass(frozen=True)
class Lists:
    """Lists of numbers of any lengths, one behind the other."""

    values: NDArray[np.int64]
    bounds: NDArray[np.int64]
    """List k is values bounds[k] to bounds[k + 1]."""

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> "Lists":
        bounds = list(accumulate(map(len, lists), initial=0))
        return cls(
            np.fromiter((number for each in lists for number in each), np.int64, bounds[-1]),
            np.array(bounds),
        )

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.values[self.bounds[index] : self.bounds[index + 1]]

    @property
    def longest(self) -> int:
        return int(np.diff(self.bounds).max(initial=0))


@dataclass(frozen=True)
class Queries:
    """All records of a data set. Texts are numbered, and equal texts have equal numbers."""

    texts: Lists
    """The tokens of each text, with its prompt."""
    queries: NDArray[np.int64]
    """[records]: the number of each query's text."""
    answers: Lists
    """The numbers of each query's documents that answer it."""
    others: Lists
    """Those of its hard negatives."""
    unread: Counter[str]
    """Fields that are not content -> number of records that have them."""

    def __len__(self) -> int:
        return len(self.queries)


def read_queries(
    words: Sequence[str], tokenizer: Tokenizer, form: EmbeddingForm, flag: str = "--finetune-data"
) -> Queries:
    """Read all records. Raises UsageError; CorruptCheckpoint with file and line for a record without a query or document."""
    table = _Table(tokenizer, form.prompt(DOCUMENT))
    queries: list[int] = []
    answers: list[list[int]] = []
    others: list[list[int]] = []
    unread: Counter[str] = Counter()
    for name in find_files(words, flag):
        for record in read_records(name):
            try:
                found = _read(record)
                before = form.prompt(QUERY) if found.prompt is None else found.prompt
                queries.append(table.number(before + found.query))
                answers.append(table.documents(found.answers))
                others.append(table.documents(found.others))
            except (BadRecord, UsageError, ValueError, TypeError) as error:
                raise CorruptCheckpoint(f"{record.where}: {_reason(record, error)}") from error
            unread.update(found.unread)
    if not queries:
        raise CorruptCheckpoint(f"{', '.join(words)}: there are no queries")
    return Queries(
        Lists.of(table.tokens), np.array(queries), Lists.of(answers), Lists.of(others), unread
    )


def _read(record: Record) -> QueryRecord:
    if isinstance(record.content, str):
        raise BadRecord(
            "is plain text; expected records with a query and a document that answers it"
        )
    return read_query(read_fields(record.content))


def _reason(record: Record, error: Exception) -> object:
    """The reason why a record can't be read: a tokenizer's own message about half a character doesn't name it."""
    if isinstance(error, BadRecord | UsageError) or isinstance(record.content, str):
        return error
    return HALF_CHARACTER if has_half_character(read_fields(record.content)) else error


class _Table:
    """Numbers of texts, and their tokens."""

    def __init__(self, tokenizer: Tokenizer, before_documents: str) -> None:
        self._tokenizer, self._before_documents = tokenizer, before_documents
        self._numbers: dict[str, int] = {}
        self.tokens: list[list[int]] = []

    def documents(self, texts: Sequence[str]) -> list[int]:
        """Return the numbers of documents. Raises as `number` does."""
        return [self.number(self._before_documents + text) for text in texts]

    def number(self, text: str) -> int:
        """Return the number of a text. Raises UsageError for one without a token, and the tokenizer's errors."""
        found = self._numbers.get(text)
        if found is None:
            self.tokens.append(text_tokens(self._tokenizer, text))
            found = self._numbers[text] = len(self._numbers)
        return found
