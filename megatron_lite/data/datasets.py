"""Builds the datasets for training, validation and test from the data flags, which have Megatron's names and meanings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megaconv.errors import UsageError
from megatron_lite.data.blend import (
    BlendedDataset,
    BlendIndices,
    blend_all,
    blend_by_weight,
    normalized,
)
from megatron_lite.data.corpora import SPLITS, Corpora, Part, parse_corpora, parse_split
from megatron_lite.data.gpt_dataset import GPTSampling
from megatron_lite.data.index_cache import cache_key, cached
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.mock import SPLIT as MOCK_SPLIT
from megatron_lite.data.mock import MockDocuments
from megatron_lite.data.samples import NO_TOKEN, Dataset, SampleForm
from megatron_lite.data.stored import DataCache
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.settings.learning import Data

SURPLUS = 0.005
"""Fraction of extra samples requested from each corpus of a blend, because a blend may take a few more than its share."""

DEFAULT_SPLIT = "969,30,1"


@dataclass(frozen=True)
class DataOptions:
    """Each field is one of Megatron's flags."""

    seq_length: int
    seed: int = 1234
    data_path: Sequence[str] = ()
    """One prefix, several prefixes, or alternating weights and prefixes."""
    split: str | None = None
    """Parts of `data_path` for training, validation and test; default 969,30,1."""
    train_data_path: Sequence[str] = ()
    valid_data_path: Sequence[str] = ()
    test_data_path: Sequence[str] = ()
    finetune_data: Sequence[str] = ()
    """Files of finetuning examples; megatron_lite.data.finetuning builds their datasets."""
    mock_data: bool = False
    data_cache_path: Path | None = None
    data_cache_bytes: int = 16 << 30
    """Bytes that `data_cache_path` keeps of data in a store, besides indices."""
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False


class Sampling(Protocol):
    """Makes samples of one kind from one corpus."""

    def has_any(self, corpus: IndexedDataset, part: Part) -> bool:
        """Return whether the part of the corpus contains any data for samples."""
        ...

    def dataset(self, corpus: IndexedDataset, part: Part, samples: int | None) -> Dataset | None:
        """Return the dataset of the part, or None if there is no data. samples: the least number drawn; None: one epoch."""
        ...


def build_datasets(
    options: DataOptions,
    tokenizer: Tokenizer,
    samples: Sequence[int | None],
    sampling: Sampling | None = None,
) -> list[Dataset | None]:
    """Return the datasets for training, validation and test; None for a dataset without data or without requested samples.

    samples: the least number drawn from each; None: one epoch. The order of samples depends on this number.
    sampling: None for a decoder, which predicts the next token. Every process may call the function at the same time.
    Raises UsageError for contradictions, CorruptCheckpoint for bad files.
    """
    check_sources(options)
    if options.seq_length < 1:
        raise UsageError(f"--seq-length {options.seq_length}: a sample has one token at least")
    next_token = GPTSampling(
        _form(options, tokenizer), options.seq_length, options.seed, options.data_cache_path
    )  # fmt: skip
    found: list[Dataset | None] = []
    if options.mock_data:
        mock = MockDocuments(tokenizer.vocab_size, _eod(tokenizer))
        for part, count in zip(parse_split(MOCK_SPLIT), samples, strict=True):
            found.append(None if part is None else next_token.dataset(mock, part, count))
        return found
    cache = DataCache(options.data_cache_path, options.data_cache_bytes)
    builder = _Builder(options, sampling or next_token, cache)
    if options.data_path:
        corpora = parse_corpora(options.data_path)
        parts = parse_split(options.split or DEFAULT_SPLIT)
        for part, count in zip(parts, samples, strict=True):
            found.append(builder.split(corpora, part, count))
        return found
    for name, count in zip(SPLITS, samples, strict=True):
        paths: Sequence[str] = getattr(options, f"{name}_data_path")
        if not paths:
            found.append(None)
            continue
        corpora = parse_corpora(paths, f"--{name}-data-path")
        if len(corpora.prefixes) == 1:
            # A single corpus is not a blend, even with a weight.
            corpora = Corpora(corpora.prefixes, None)
        found.append(builder.split(corpora, (0.0, 1.0), count))
    return found


def check_sources(options: DataOptions | Data) -> None:
    """Raise UsageError unless there is exactly one source of data."""
    separate = [name for name in SPLITS if getattr(options, f"{name}_data_path")]
    sources = [
        bool(options.mock_data),
        bool(options.data_path),
        bool(options.finetune_data),
        bool(separate),
    ]
    if options.data_path and separate:
        raise UsageError(
            f"--data-path is divided by --split, so --{separate[0]}-data-path can't be given beside it (nor in Megatron-LM); "
            "give --train-data-path in place of --data-path and --split"
        )
    if sum(sources) != 1:
        raise UsageError(
            "give one of --data-path, --train-data-path (with --valid-data-path, --test-data-path), --finetune-data, --mock-data; "
            + ("no training data is given" if not any(sources) else "they exclude each other")
        )
    if separate and options.split is not None:
        raise UsageError(
            f"--split divides --data-path; with --{separate[0]}-data-path there is nothing to divide: leave --split out"
        )


def _form(options: DataOptions, tokenizer: Tokenizer) -> SampleForm:
    """Return the form of samples. If the padding token is also the end token, no token counts as padding.

    In the data, such a token could have either meaning.
    """
    pad = tokenizer.pad
    resets = options.reset_position_ids, options.reset_attention_mask, options.eod_mask_loss
    eod = _eod(tokenizer) if any(resets) else tokenizer.eod
    return SampleForm(
        NO_TOKEN if eod is None else eod, NO_TOKEN if pad is None or pad == eod else pad, *resets
    )


def _eod(tokenizer: Tokenizer) -> int:
    if tokenizer.eod is None:
        raise UsageError(
            "the tokenizer has no token that ends a document, which the flags about data ask for"
        )
    return tokenizer.eod


@dataclass(frozen=True)
class _Builder:
    options: DataOptions
    sampling: Sampling
    cache: DataCache

    def split(self, corpora: Corpora, part: Part | None, samples: int | None) -> Dataset | None:
        """Return the dataset for a part of the corpora, or None if there is no data."""
        if corpora.weights is None and len(corpora.prefixes) == 1:
            return self.single(self.cache.dataset(corpora.prefixes[0]), part, samples)
        return self._blend(corpora, part, samples)

    def single(
        self, corpus: IndexedDataset, part: Part | None, samples: int | None
    ) -> Dataset | None:
        """Return the dataset for a part of one corpus."""
        return (
            None if part is None or samples == 0 else self.sampling.dataset(corpus, part, samples)
        )

    def _blend(self, corpora: Corpora, part: Part | None, samples: int | None) -> Dataset | None:
        """Return the blend of parts of several corpora. If a part is empty, the other corpora get its weight."""
        if part is None or samples == 0:
            return None
        opened = [self.cache.dataset(prefix) for prefix in corpora.prefixes]
        if corpora.weights is None:
            return self._in_proportion(opened, part, samples)
        if samples is None:
            raise UsageError(
                "weights before the corpora need a number of samples; leave them out for one epoch of all"
            )
        present = [
            (dataset, weight)
            for dataset, weight in zip(opened, corpora.weights, strict=True)
            if self.sampling.has_any(dataset, part)
        ]
        if not present:
            return None
        weights = normalized([weight for _, weight in present])
        shares = [math.ceil(samples * weight) for weight in weights.tolist()]
        asked = [math.ceil(share * (1 + SURPLUS)) for share in shares]
        built = [
            self.single(dataset, part, count)
            for (dataset, _), count in zip(present, asked, strict=True)
        ]
        # Megatron normalizes twice, and the last bits decide ties.
        return self._blended(built, normalized(weights.tolist()), sum(shares))

    def _in_proportion(
        self, opened: Sequence[IndexedDataset], part: Part, samples: int | None
    ) -> Dataset | None:
        built = [self.single(dataset, part, None) for dataset in opened]
        sizes = [len(dataset) for dataset in built if dataset]
        if not sizes:
            return None
        if samples is None:
            return self._blended(built, None, sum(sizes))
        return self._blended(built, normalized(sizes), min(samples, sum(sizes)))

    def _blended(
        self, built: Sequence[Dataset | None], weights: NDArray[np.float64] | None, size: int
    ) -> BlendedDataset:
        """Return a blend of the datasets. weights: None to draw every sample once."""
        datasets = [dataset for dataset in built if dataset]
        sizes = [len(dataset) for dataset in datasets]
        key = cache_key(what="blend", weights=weights if weights is not None else sizes, size=size)
        arrays = cached(
            self.options.data_cache_path, key, BlendIndices._fields,
            lambda: blend_all(sizes) if weights is None else blend_by_weight(weights, size),
        )  # fmt: skip
        return BlendedDataset(datasets, BlendIndices(*arrays))
