"""The passages that are embedded: DPR's TSV, JSON lines, or blocks of an indexed dataset.

    psgs_w100.tsv      id TAB text TAB title, with a header
    passages.jsonl     {"id": 7, "title": ..., "text": ...}; without `id`, rows are numbered from 0

Files are read as streams: only a row is in memory.
"""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import blake3
import numpy as np

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.blocks.mapping import Corpus, build_blocks
from megatron_lite.data.blocks.samples import Special, block_with_title
from megatron_lite.data.indexed import IndexedDataset, idx_path
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.retrieval.embedder import Passage

EPOCH_SEED = 1
"""Megatron's seed for the blocks of an index."""
_FIELD = 1 << 24
"""The most characters of a field of a TSV file."""


class Evidence(Protocol):
    """Passages in a fixed order."""

    def rows(self) -> Iterator[Passage]:
        """Yield all passages. Raises CorruptCheckpoint with the line."""
        ...

    def identity(self) -> str:
        """Return a hash of the content."""
        ...


@dataclass(frozen=True)
class FileEvidence:
    """Passages of a TSV or JSON lines file."""

    path: Path

    def rows(self) -> Iterator[Passage]:
        is_json = self.path.suffix in (".jsonl", ".json")
        yield from self._json_lines() if is_json else self._table()

    def identity(self) -> str:
        digest = blake3.blake3()
        digest.update_mmap(self.path)
        return digest.hexdigest()[:32]

    def _table(self) -> Iterator[Passage]:
        csv.field_size_limit(min(_FIELD, sys.maxsize))
        with self.path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file, delimiter="\t")
            for row in reader:
                if reader.line_num == 1 and row[:1] == ["id"]:
                    continue
                where = f"{self.path}: line {reader.line_num}"
                if len(row) != 3:
                    raise CorruptCheckpoint(
                        f"{where}: has {len(row)} columns; id, text and title, separated by tabs, were expected"
                    )
                yield Passage(_id(where, row[0]), row[1], row[2])

    def _json_lines(self) -> Iterator[Passage]:
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                where = f"{self.path}: line {number + 1}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise CorruptCheckpoint(f"{where}: is not JSON: {error}") from error
                if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                    raise CorruptCheckpoint(
                        f"{where}: has no `text`; id, title and text were expected"
                    )
                title = row.get("title") or ""
                yield Passage(_id(where, row.get("id", number)), row["text"], str(title))


def _id(where: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < 1 << 63:
        raise CorruptCheckpoint(f"{where}: the id {value!r} is not a number")
    return number


@dataclass(frozen=True)
class BlockEvidence:
    """Blocks of sentences with their titles: one epoch, as Megatron indexes ICT's corpus. The id is the block's number."""

    sentences: IndexedDataset
    titles: IndexedDataset
    tokenizer: Tokenizer
    seq_length: int
    special: Special
    least_sentences: int = 2

    def rows(self) -> Iterator[Passage]:
        titles = self._titles()
        corpus = Corpus(
            self.sentences.documents, self.sentences.lengths, [len(title) for title in titles]
        )
        blocks = build_blocks(corpus, None, self.seq_length, EPOCH_SEED, self.least_sentences)
        for first, end, document, number in blocks.tolist():
            tokens = [
                token
                for sentence in range(first, end)
                for token in self.sentences.get(sentence).tolist()
            ]
            title = titles[document]
            row = block_with_title(tokens, title, self.seq_length, self.special)
            text = self.tokenizer.detokenize(tokens)
            yield Passage(number, text, self.tokenizer.detokenize(title), row)

    def identity(self) -> str:
        digest = blake3.blake3(f"{self.seq_length} {self.least_sentences}".encode())
        for dataset in (self.sentences, self.titles):
            digest.update_mmap(idx_path(dataset.prefix))
            digest.update_mmap(f"{dataset.prefix}.bin")
        return digest.hexdigest()[:32]

    def _titles(self) -> list[list[int]]:
        """Return the title of each document: all its sequences, at most half a row."""
        bounds = self.titles.documents.tolist()
        titles = []
        for first, end in pairwise(bounds):
            parts = [self.titles.get(number) for number in range(first, end)]
            joined = np.concatenate(parts).tolist() if parts else []
            titles.append(joined[: self.seq_length // 2])
        return titles


def open_evidence(path: Path) -> FileEvidence:
    """Return the passages of a file. Raises CorruptCheckpoint if there is none."""
    if not path.is_file():
        raise CorruptCheckpoint(f"{path}: no such file; --evidence-data-path names passages")
    return FileEvidence(path)


def open_blocks(
    data: str, titles: str, tokenizer: Tokenizer, seq_length: int, *, one_sentence: bool
) -> BlockEvidence:
    """Return the blocks of an indexed dataset. Raises UsageError, CorruptCheckpoint."""
    sentences, headings = IndexedDataset(data), IndexedDataset(titles)
    counts = [len(dataset.documents) - 1 for dataset in (sentences, headings)]
    if counts[0] != counts[1]:
        raise UsageError(
            f"{data} has {counts[0]:,} documents and {titles} has {counts[1]:,}; both must come from the same corpus"
        )
    special = special_tokens(tokenizer)
    least = 1 if one_sentence else 2
    return BlockEvidence(sentences, headings, tokenizer, seq_length, special, least)


def special_tokens(tokenizer: Tokenizer) -> Special:
    """Return [CLS], [SEP] and [PAD]. Raises UsageError for a tokenizer that isn't a BERT's, or whose padding isn't 0."""
    find: Any = getattr(tokenizer, "special", lambda name: None)
    found: Sequence[int | None] = [find(name) for name in ("cls", "sep", "pad")]
    if found[0] is None or found[1] is None or found[2] != 0:
        raise UsageError(
            "a retriever needs a BERT's tokenizer: it has [CLS] and [SEP], and its token 0 is [PAD]"
        )
    return Special(found[0], found[1], found[2])
