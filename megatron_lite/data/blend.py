"""Blends several corpora in proportion to their weights, like megatron-core's BlendedDataset and its C++ helper."""

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaconv.errors import UsageError
from megatron_lite.data.samples import Arrays, Dataset

MOST_DATASETS = 32766


class BlendIndices(NamedTuple):
    """Sample i of a blend is sample `sample[i]` of dataset `dataset[i]`."""

    dataset: NDArray[np.int16]
    sample: NDArray[np.int64]


class BlendedDataset:
    """Several datasets as one, in the order of the blend. Raises UsageError if a dataset has too few samples."""

    def __init__(self, datasets: Sequence[Dataset], indices: BlendIndices) -> None:
        self._datasets, self._indices = datasets, indices
        taken = np.bincount(indices.dataset, minlength=len(datasets))
        for number, (dataset, count) in enumerate(zip(datasets, taken.tolist(), strict=True)):
            if count > len(dataset):
                raise UsageError(
                    f"the blend takes {count:,} samples of corpus {number}, which has {len(dataset):,}; change its weight a little"
                )

    def __len__(self) -> int:
        return len(self._indices.dataset)

    def __getitem__(self, index: int) -> Arrays:
        return self._datasets[int(self._indices.dataset[index])][int(self._indices.sample[index])]


def normalized(weights: Sequence[float]) -> NDArray[np.float64]:
    """Return the weights scaled to sum 1, float64."""
    values = np.array(weights, np.float64)
    return values / np.sum(values)


def blend_by_weight(weights: NDArray[np.float64], size: int) -> BlendIndices:
    """Take each next sample from the corpus that is furthest behind its share, or from the first of several such corpora.

    weights: float64, sum 1. About 1 µs per sample, more for many corpora.
    """
    return _greedy(weights, size, [size] * len(weights))


def blend_all(sizes: Sequence[int]) -> BlendIndices:
    """Take every sample of every corpus once, in proportion to the sizes as long as samples remain."""
    total = sum(sizes)
    return _greedy(np.array(sizes, np.int64) / float(total), total, sizes)


def _greedy(weights: NDArray[np.float64], size: int, available: Sequence[int]) -> BlendIndices:
    """Python floats are faster here than numpy for a typical blend of fewer than a hundred corpora."""
    shares, left = weights.tolist(), list(available)
    taken = [0.0] * len(shares)
    chosen = array("h")
    for position in range(size):
        # As in Megatron, position 0 counts as 1.
        drawn = float(position or 1)
        behind = [share * drawn - count for share, count in zip(shares, taken)]  # noqa: B905
        corpus = behind.index(max(behind))
        chosen.append(corpus)
        taken[corpus] += 1
        left[corpus] -= 1
        if not left[corpus]:
            taken[corpus] = math.inf  # exhausted: it is never chosen again
    dataset = np.frombuffer(chosen, np.int16) if chosen else np.empty(0, np.int16)
    sample = np.empty(size, np.int64)
    for corpus in range(len(shares)):
        (places,) = np.nonzero(dataset == corpus)
        sample[places] = np.arange(len(places))
    return BlendIndices(dataset, sample)
