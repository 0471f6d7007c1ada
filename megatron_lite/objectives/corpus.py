"""Indexed corpora as training data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from formats.wording import counted
from megaconv.options.values import byte_size
from megatron_lite.checkpoint.state import Progress
from megatron_lite.data.corpora import parse_corpora, parse_split
from megatron_lite.data.datasets import DEFAULT_SPLIT, DataOptions, Sampling, build_datasets
from megatron_lite.data.index_cache import cache_key
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.named_corpora import read_names, with_prefixes
from megatron_lite.data.samples import Dataset
from megatron_lite.data.stored import DataCache
from megatron_lite.objectives.training_data import Say, Setup, TrainingData
from megatron_lite.settings.config import Settings
from megatron_lite.settings.sizes import Sizes

MakeSampling = Callable[[Setup], Sampling | None]
"""See Objective.sampling."""


@dataclass(frozen=True)
class Corpus(TrainingData):
    """The corpora of the data flags, or --mock-data."""

    sampling: MakeSampling
    beside: Mapping[str, str] = field(default_factory=dict)
    """The prefix of a corpus -> the prefix of another dataset, of which its samples have parts."""

    def fitted(
        self, settings: Settings, sizes: Sizes, progress: Progress, say: Say
    ) -> tuple[Settings, "Corpus"]:
        """See TrainingData.fitted. It converts --epochs of one corpus to steps."""
        training = settings.training
        if training.epochs is None or not settings.data.data_path:
            return settings, self
        samples = training.epochs * _samples_of_an_epoch(settings, sizes.seq)
        left = max(0, samples - progress.consumed_samples)
        steps = progress.iteration + -(-left // sizes.batch.full)
        say(f"--train-iters {steps}: {counted(training.epochs, 'epoch')} of the corpus")
        return replace(settings, training=replace(training, train_iters=steps)), self

    def datasets(self, setup: Setup, samples: Sequence[int]) -> list[Dataset | None]:
        options = _options(setup.settings, setup.sizes)
        return build_datasets(options, setup.tokenizer, samples, self.sampling(setup))

    def identity(self, setup: Setup) -> str | None:
        """See TrainingData.identity. It is a hash of the lengths of sequences and documents, because tokens are too many to
        be read."""
        options = _options(setup.settings, setup.sizes)
        words = options.data_path or options.train_data_path
        if not words:
            return None
        cache = DataCache(options.data_cache_path, options.data_cache_bytes)
        prefixes = parse_corpora(words).prefixes
        others = [self.beside[prefix] for prefix in prefixes if prefix in self.beside]
        opened = [cache.dataset(prefix) for prefix in (*prefixes, *others)]
        return cache_key(parts=[_lengths_key(corpus) for corpus in opened])


def _lengths_key(corpus: IndexedDataset) -> str:
    """Return a hash of the lengths of a dataset's sequences, and of the documents that they make up."""
    of_one_sequence = np.arange(len(corpus.lengths) + 1)
    if np.array_equal(corpus.documents, of_one_sequence):
        return cache_key(lengths=corpus.lengths)
    return cache_key(lengths=corpus.lengths, documents=corpus.documents)


def _samples_of_an_epoch(settings: Settings, seq: int) -> int:
    """Return the number of samples in the training part of the only corpus, at least 1."""
    assert settings.data.data_path is not None
    names = read_names(settings.data.corpora)
    [prefix] = with_prefixes(settings.data.data_path, names, "--data-path")
    size = byte_size(settings.data.data_cache_size, "--data-cache-size ")
    corpus = DataCache(cache_path(settings), size).dataset(prefix)
    tokens = int(corpus.lengths.sum())
    part = parse_split(settings.data.split or DEFAULT_SPLIT)[0]
    first, last = part or (0.0, 0.0)
    return max(1, int(tokens * (last - first)) // seq)


def _options(settings: Settings, sizes: Sizes) -> DataOptions:
    data = settings.data
    names = read_names(data.corpora)
    return DataOptions(
        seq_length=sizes.seq,
        seed=settings.training.seed,
        data_path=with_prefixes(data.data_path or (), names, "--data-path"),
        split=data.split,
        train_data_path=with_prefixes(data.train_data_path or (), names, "--train-data-path"),
        valid_data_path=with_prefixes(data.valid_data_path or (), names, "--valid-data-path"),
        test_data_path=with_prefixes(data.test_data_path or (), names, "--test-data-path"),
        mock_data=data.mock_data,
        data_cache_path=cache_path(settings),
        data_cache_bytes=byte_size(data.data_cache_size, "--data-cache-size "),
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )


def cache_path(settings: Settings) -> Path | None:
    """Return the directory that keeps the indices of samples."""
    return Path(settings.data.data_cache_path) if settings.data.data_cache_path else None
