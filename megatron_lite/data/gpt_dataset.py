"""Samples of consecutive tokens, across document boundaries, in Megatron's order (see `gpt_index`)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.corpora import Part, part_of
from megatron_lite.data.gpt_index import Indices, build_indices
from megatron_lite.data.index_cache import cache_key, cached
from megatron_lite.data.samples import Sample, SampleForm
from megatron_lite.data.tokens import Documents


class GPTDataset:
    """One split of one indexed dataset. Thread-safe: reading changes nothing."""

    def __init__(self, documents: Documents, indices: Indices, form: SampleForm) -> None:
        self._documents, self._indices, self._form = documents, indices, form

    def __len__(self) -> int:
        return len(self._indices.shuffle)

    def __getitem__(self, index: int) -> Sample:
        return self._form.sample(self.window(index))

    def window(self, index: int) -> NDArray[np.int64]:
        """Return int64[seq_length + 1]: the tokens of a sample and the next token."""
        order, starts, shuffle = self._indices
        row = int(shuffle[index])
        (first, start), (last, end) = starts[row].tolist(), starts[row + 1].tolist()
        bounds = [
            (start if entry == first else 0, end + 1 if entry == last else None)
            for entry in range(first, last + 1)
        ]
        parts = [
            self._documents.get(
                int(order[first + place]), begin, None if stop is None else stop - begin
            )
            for place, (begin, stop) in enumerate(bounds)
        ]
        return np.concatenate(parts, dtype=np.int64)

    def documents(self, index: int) -> NDArray[np.int64]:
        """Return the numbers of the documents of a sample, in order."""
        order, starts, shuffle = self._indices
        row = int(shuffle[index])
        first, last = int(starts[row][0]), int(starts[row + 1][0])
        return order[first : last + 1].astype(np.int64)


@dataclass(frozen=True)
class GPTSampling:
    """Samples for decoders. A corpus is split by sequences; data for decoders has one sequence per document."""

    form: SampleForm
    seq_length: int
    seed: int
    cache: Path | None = None

    def has_any(self, corpus: Documents, part: Part) -> bool:
        """See datasets.Sampling."""
        return bool(corpus.lengths[part_of(part, len(corpus.lengths))].any())

    def dataset(self, corpus: Documents, part: Part, samples: int | None) -> GPTDataset | None:
        """See datasets.Sampling."""
        if samples == 0 or not self.has_any(corpus, part):
            return None
        members, lengths = part_of(part, len(corpus.lengths)), corpus.lengths
        key = cache_key(
            what="GPT samples", lengths=lengths[members], first=int(members[0]), largest=int(lengths.max()),
            seq_length=self.seq_length, samples=samples, seed=self.seed,
        )  # fmt: skip
        arrays = cached(
            self.cache, key, Indices._fields,
            lambda: build_indices(lengths, members, self.seq_length, samples, self.seed),
        )  # fmt: skip
        return GPTDataset(corpus, Indices(*arrays), self.form)
