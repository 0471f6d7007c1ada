"""Samples of the inverse cloze task from an indexed corpus of sentences and an indexed corpus of titles."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaconv.errors import UsageError
from megatron_lite.data.blocks.mapping import ENDS, Corpus, build_blocks
from megatron_lite.data.blocks.samples import (
    Ids,
    Sample,
    Special,
    block_with_title,
    draw,
    ict_sample,
)
from megatron_lite.data.corpora import Part, part_of
from megatron_lite.data.index_cache import cache_key, cached
from megatron_lite.data.indexed import IndexedDataset

Say = Callable[[str], None]


class Titles:
    """The title of each document. Megatron's title is a document's first sequence; here it is all of them, joined."""

    def __init__(self, titles: IndexedDataset, longest: int, cut_to: int) -> None:
        """longest: tokens of the longest title that is used whole. cut_to: tokens that are left of longer ones."""
        self._titles, self._longest, self._cut_to = titles, longest, cut_to
        ends = np.concatenate(([0], np.cumsum(titles.lengths, dtype=np.int64)))
        whole = np.diff(ends[titles.documents])
        self.cut = whole > longest
        """bool [documents]: the titles that are cut."""
        self.lengths: NDArray[np.int64] = np.where(self.cut, cut_to, whole)
        """Tokens of each document's title."""

    @property
    def prefix(self) -> str:
        return self._titles.prefix

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> list[int]:
        first, last = self._titles.documents[document : document + 2].tolist()
        tokens = [
            token for number in range(first, last) for token in self._titles.get(number).tolist()
        ]
        return tokens[: int(self.lengths[document])]


def open_titles(corpus: IndexedDataset, prefix: str, seq_length: int) -> Titles:
    """Return the titles of a corpus. Raises UsageError if they are those of other documents."""
    titles = IndexedDataset(prefix)
    documents = len(corpus.documents) - 1
    found = len(titles.documents) - 1
    if documents != found:
        raise UsageError(
            f"{prefix}: has {found:,} titles, {corpus.prefix} has {documents:,} documents; preprocess both with one command: "
            "--json-keys text title --split-sentences"
        )
    return Titles(titles, longest=seq_length - ENDS, cut_to=seq_length // 2)


@dataclass(frozen=True)
class BlockDataset:
    """One split of one corpus. Thread-safe: reading changes nothing."""

    sentences: IndexedDataset
    titles: Titles
    mapping: NDArray[np.int64]
    """The result of build_blocks."""
    seq_length: int
    special: Special
    keep_probability: float = 0.0
    seed: int = 0

    def __len__(self) -> int:
        return len(self.mapping)

    def __getitem__(self, index: int) -> Sample:
        first, last, document, _ = self.mapping[index].tolist()
        sentences = [self.sentences.get(number).tolist() for number in range(first, last)]
        drawn = draw(len(sentences), self.keep_probability, self.seed, index)
        return ict_sample(sentences, self.titles[document], drawn, self.seq_length, self.special)

    def block(self, index: int) -> Ids:
        """Return int64 [seq_length]: a block with its title, whole, as evidence for retrieval."""
        first, last, document, _ = self.mapping[index].tolist()
        tokens = np.concatenate([self.sentences.get(number) for number in range(first, last)])
        return block_with_title(
            tokens.tolist(), self.titles[document], self.seq_length, self.special
        )


@dataclass(frozen=True)
class BlockSampling:
    """Samples of blocks with titles; see datasets.Sampling. A corpus is split by documents."""

    titles: Mapping[str, str]
    """The prefix of a corpus of sentences -> the prefix of its titles."""
    seq_length: int
    special: Special
    keep_probability: float
    least_sentences: int
    seed: int
    say: Say
    cache: Path | None = None

    def has_any(self, corpus: IndexedDataset, part: Part) -> bool:
        """See datasets.Sampling."""
        return len(part_of(part, len(corpus.documents) - 1)) > 0

    def dataset(
        self, corpus: IndexedDataset, part: Part, samples: int | None
    ) -> BlockDataset | None:
        """See datasets.Sampling. Raises UsageError for titles of other documents."""
        titles = open_titles(corpus, self.titles[corpus.prefix], self.seq_length)
        members = part_of(part, len(corpus.documents) - 1)
        if not len(members):
            return None
        first, last = int(members[0]), int(members[-1]) + 1
        cut = int(titles.cut[first:last].sum())
        if cut:
            self.say(
                f"{corpus.prefix}: {cut:,} titles have more than {self.seq_length - ENDS} tokens; "
                f"their first {self.seq_length // 2} are used"
            )
        mapping = self._mapping(corpus, titles, first, last, samples)
        if not len(mapping):
            return None
        return BlockDataset(
            corpus,
            titles,
            mapping,
            self.seq_length,
            self.special,
            self.keep_probability,
            self.seed,
        )

    def _mapping(
        self, corpus: IndexedDataset, titles: Titles, first: int, last: int, samples: int | None
    ) -> NDArray[np.int64]:
        """Return the blocks of documents [first, last)."""
        documents = corpus.documents[first : last + 1]
        title_lengths = titles.lengths[first:last]
        own = Corpus(documents, corpus.lengths, title_lengths.tolist(), first)
        key = cache_key(
            what="blocks with titles",
            documents=documents,
            lengths=corpus.lengths[documents[0] : documents[-1]],
            titles=title_lengths,
            first=first,
            samples=samples,
            longest=self.seq_length,
            seed=self.seed,
            least=self.least_sentences,
        )
        (mapping,) = cached(
            self.cache,
            key,
            ("mapping",),
            lambda: [build_blocks(own, samples, self.seq_length, self.seed, self.least_sentences)],
        )
        return mapping
