"""Masked samples of one corpus of sentences, in Megatron's order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.corpora import Part, part_of
from megatron_lite.data.index_cache import cache_key, cached
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.masked.mapping import build_mapping
from megatron_lite.data.samples import Arrays

Make = Callable[[Sequence[Sequence[int]], int, int], Arrays]
"""make(sentences, largest number of tokens, seed) -> a sample."""


class MaskedDataset:
    """One split of one indexed dataset. Thread-safe: reading changes nothing."""

    def __init__(
        self, corpus: IndexedDataset, mapping: NDArray[np.int64], seed: int, make: Make
    ) -> None:
        """mapping: from build_mapping."""
        self._corpus, self._mapping, self._seed, self._make = corpus, mapping, seed, make

    def __len__(self) -> int:
        return len(self._mapping)

    def __getitem__(self, index: int) -> Arrays:
        first, last, longest = self._mapping[index].tolist()
        sentences = [self._corpus.get(number).tolist() for number in range(first, last)]
        return self._make(sentences, longest, self._seed + index)


@dataclass(frozen=True)
class MaskedSampling:
    """Samples for BERT and T5. A corpus is split by documents; each document has one sequence per sentence."""

    make: Make
    longest: int
    """Tokens of a sample without the tokens that are added to it."""
    least_sentences: int
    """Least number of sentences of a document and of a sample."""
    short_probability: float
    seed: int
    cache: Path | None = None

    def has_any(self, corpus: IndexedDataset, part: Part) -> bool:
        """See datasets.Sampling."""
        return len(part_of(part, len(corpus.documents) - 1)) > 0

    def dataset(
        self, corpus: IndexedDataset, part: Part, samples: int | None
    ) -> MaskedDataset | None:
        """See datasets.Sampling."""
        if not self.has_any(corpus, part):
            return None
        members = part_of(part, len(corpus.documents) - 1)
        documents = corpus.documents[members[0] : members[-1] + 2]
        lengths = corpus.lengths
        key = cache_key(
            what="masked samples", documents=documents, lengths=lengths[documents[0] : documents[-1]], samples=samples,
            longest=self.longest, short=self.short_probability, seed=self.seed, least=self.least_sentences,
        )  # fmt: skip
        (mapping,) = cached(
            self.cache, key, ("mapping",),
            lambda: [build_mapping(
                documents, lengths, samples, self.longest, self.short_probability, self.seed, self.least_sentences
            )],
        )  # fmt: skip
        return MaskedDataset(corpus, mapping, self.seed, self.make) if len(mapping) else None
