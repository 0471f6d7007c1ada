"""The samples of GPT whose chunks have neighbours: their tokens and their documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from megaconv.errors import UsageError
from megatron_lite.data.corpora import SPLITS, Part
from megatron_lite.data.datasets import DataOptions, build_datasets
from megatron_lite.data.gpt_dataset import GPTDataset, GPTSampling
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.samples import NO_TOKEN, Dataset, SampleForm
from megatron_lite.data.tokenizer import NullTokenizer


class Window(NamedTuple):
    """A sample before it is divided into inputs and labels."""

    tokens: NDArray[np.int64]
    """int64 [seq_length + 1]"""
    dataset: int
    """Number of the dataset in the blend."""
    documents: NDArray[np.int64]
    """The documents of the sample, in order."""


@dataclass(frozen=True)
class _WindowDataset:
    inner: GPTDataset
    number: int

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Window:
        return Window(self.inner.window(index), self.number, self.inner.documents(index))


@dataclass(frozen=True)
class _WindowSampling:
    """See data.datasets.Sampling."""

    inner: GPTSampling
    prefixes: Sequence[str]

    def has_any(self, corpus: IndexedDataset, part: Part) -> bool:
        return self.inner.has_any(corpus, part)

    def dataset(self, corpus: IndexedDataset, part: Part, samples: int | None) -> Dataset | None:
        found = self.inner.dataset(corpus, part, samples)
        if found is None:
            return None
        return _WindowDataset(found, self.prefixes.index(corpus.prefix))


@dataclass(frozen=True)
class Windows:
    """The samples of a split, in megatron-core's order. Numbers are taken modulo the samples that are queried."""

    _dataset: Dataset
    _samples: int

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Window:
        return cast(Window, self._dataset[index % self._samples])

    def window(self, index: int) -> NDArray[np.int64]:
        """Return int64 [seq_length + 1]."""
        return self[index].tokens

    def documents(self, index: int) -> tuple[int, NDArray[np.int64]]:
        """Return the dataset of a sample and its documents there."""
        found = self[index]
        return found.dataset, found.documents


def windows_of(
    options: DataOptions, prefixes: Sequence[str], split: str, samples: int, cache: Path | None
) -> Windows | None:
    """Return the samples of a split; None for a split without data or samples. Raises UsageError, CorruptCheckpoint."""
    if not samples:
        return None
    form = SampleForm(NO_TOKEN)  # windows carry tokens as they are in the data
    sampling = _WindowSampling(GPTSampling(form, options.seq_length, options.seed, cache), prefixes)
    wanted = [samples if name == split else 0 for name in SPLITS]
    found = build_datasets(options, NullTokenizer(0), wanted, sampling)[SPLITS.index(split)]
    if found is None:
        return None
    if len(found) < samples:
        raise UsageError(f"the {split} data have {len(found):,} samples, {samples:,} are needed")
    return Windows(found, samples)
