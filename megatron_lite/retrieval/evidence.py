"""The passages that are embedded: DPR's TSV, JSON lines, or blocks of an indexed dataset.

    psgs_w100.tsv      id TAB text TAB title, with a header
    passages.jsonl     {"id": 7, "title": ..., "text": ...}; without `id`, rows are numbered from 0

Files are read as streams: only a row is in memory.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import blake3
import numpy as np

from formats.errors import CorruptCheckpoint
from formats.wording import counted
from megatron_lite.data.blocks.dataset import BlockDataset, open_titles
from megatron_lite.data.blocks.mapping import Corpus, build_blocks
from megatron_lite.data.blocks.samples import Special
from megatron_lite.data.blocks.special import special_tokens
from megatron_lite.data.indexed import IndexedDataset, idx_path
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.retrieval.embedder import Passage
from megatron_lite.retrieval.tables import rows_of

EPOCH_SEED = 1
"""Megatron's seed for the blocks of an index."""


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
        try:
            yield from self._json_lines() if is_json else self._table()
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(f"{self.path}: is not text in UTF-8: {error}") from error

    def identity(self) -> str:
        digest = blake3.blake3()
        digest.update_mmap(self.path)
        return digest.hexdigest()[:32]

    def _table(self) -> Iterator[Passage]:
        with self.path.open(encoding="utf-8", newline="") as file:
            for number, (where, row) in enumerate(rows_of(self.path, file)):
                if number == 0 and row[:1] == ["id"]:
                    continue
                if len(row) != 3:
                    raise CorruptCheckpoint(
                        f"{where}: has {counted(len(row), 'column')}; id, text and title, separated by tabs, were expected"
                    )
                yield Passage(_id(where, row[0]), row[1], row[2])

    def _json_lines(self) -> Iterator[Passage]:
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                where = f"{self.path}:{number + 1}"
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
    except (TypeError, ValueError, OverflowError):
        number = -1
    if number != value and not isinstance(value, str):  # such as 1.5
        number = -1
    if not 0 <= number < 1 << 63:
        raise CorruptCheckpoint(f"{where}: the id {value!r} is not a number")
    return number


@dataclass(frozen=True)
class BlockEvidence:
    """Blocks of sentences with their titles: one epoch, as Megatron indexes ICT's corpus. The id is the block's number."""

    blocks: BlockDataset
    tokenizer: Tokenizer
    least_sentences: int = 2

    def rows(self) -> Iterator[Passage]:
        sentences, titles = self.blocks.sentences, self.blocks.titles
        text = self.tokenizer.detokenize
        for index, (first, end, document, number) in enumerate(self.blocks.mapping.tolist()):
            parts = [sentences.get(sentence) for sentence in range(first, end)]
            tokens = np.concatenate(parts).tolist()
            title = titles[document]
            yield Passage(number, text(tokens), text(title), self.blocks.block(index))

    def identity(self) -> str:
        digest = blake3.blake3(f"{self.blocks.seq_length} {self.least_sentences}".encode())
        for prefix in (self.blocks.sentences.prefix, self.blocks.titles.prefix):
            digest.update_mmap(idx_path(prefix))
            digest.update_mmap(f"{prefix}.bin")
        return digest.hexdigest()[:32]


def open_evidence(path: Path) -> FileEvidence:
    """Return the passages of a file. Raises CorruptCheckpoint if there is none."""
    if not path.is_file():
        raise CorruptCheckpoint(f"{path}: no such file; --evidence-data-path names passages")
    return FileEvidence(path)


def open_blocks(
    data: str, titles: str, tokenizer: Tokenizer, seq_length: int, *, one_sentence: bool
) -> BlockEvidence:
    """Return the blocks of an indexed dataset. Raises UsageError, CorruptCheckpoint."""
    special = special_tokens(tokenizer)
    return blocks_of(data, titles, tokenizer, special, seq_length, 1 if one_sentence else 2)


def blocks_of(
    data: str, titles: str, tokenizer: Tokenizer, special: Special, seq_length: int, least: int = 2
) -> BlockEvidence:
    """Return the blocks of an indexed dataset. least: sentences of a block. Raises UsageError, CorruptCheckpoint."""
    sentences = IndexedDataset(data)
    found = open_titles(sentences, titles, seq_length)
    corpus = Corpus(sentences.documents, sentences.lengths, found.lengths.tolist())
    mapping = build_blocks(corpus, None, seq_length, EPOCH_SEED, least)
    blocks = BlockDataset(sentences, found, mapping, seq_length, special)
    return BlockEvidence(blocks, tokenizer, least)
