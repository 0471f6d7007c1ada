"""Several corpora in the proportions of their weights. As megatron-core's BlendedDataset and its C++ helper do it."""

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
    values = np.array(weights, np.float64)
    return values / np.sum(values)


def blend_by_weight(weights: NDArray[np.float64], size: int) -> BlendIndices:
    """Each next sample comes from the corpus that lies furthest behind its share; the first one of equals.

    weights: float64, of sum 1. About 1 µs a sample, more for many corpora.
    """
    return _greedy(weights, size, [size] * len(weights))


def blend_all(sizes: Sequence[int]) -> BlendIndices:
    """Every sample of every corpus once, in proportion to their sizes as long as they last."""
    total = sum(sizes)
    return _greedy(np.array(sizes, np.int64) / float(total), total, sizes)


def _greedy(weights: NDArray[np.float64], size: int, available: Sequence[int]) -> BlendIndices:
    """Python's own floats are quicker here than numpy's for what a blend usually has: fewer than a hundred corpora."""
    shares, left = weights.tolist(), list(available)
    taken = [0.0] * len(shares)
    chosen = array("h")
    for position in range(size):
        drawn = float(position or 1)
        behind = [share * drawn - count for share, count in zip(shares, taken)]  # noqa: B905
        corpus = behind.index(max(behind))
        chosen.append(corpus)
        taken[corpus] += 1
        left[corpus] -= 1
        if not left[corpus]:
            taken[corpus] = math.inf  # never behind again
    dataset = np.frombuffer(chosen, np.int16) if chosen else np.empty(0, np.int16)
    sample = np.empty(size, np.int64)
    for corpus in range(len(shares)):
        (places,) = np.nonzero(dataset == corpus)
        sample[places] = np.arange(len(places))
    return BlendIndices(dataset, sample)
