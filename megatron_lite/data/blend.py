"""Several corpora in the proportions of their weights. As megatron-core's BlendedDataset and its C++ helper do it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaconv.errors import UsageError
from megatron_lite.data.samples import Dataset, Sample

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

    def __getitem__(self, index: int) -> Sample:
        return self._datasets[int(self._indices.dataset[index])][int(self._indices.sample[index])]


def normalized(weights: Sequence[float]) -> NDArray[np.float64]:
    values = np.array(weights, np.float64)
    return values / np.sum(values)


def blend_by_weight(weights: NDArray[np.float64], size: int) -> BlendIndices:
    """Each next sample comes from the corpus that lies furthest behind its share; the first one of equals.

    weights: float64, of sum 1. About 2 µs a sample.
    """
    return _greedy(weights, size, np.full(len(weights), size, np.int64))


def blend_all(sizes: Sequence[int]) -> BlendIndices:
    """Every sample of every corpus once, in proportion to their sizes as long as they last."""
    total = sum(sizes)
    return _greedy(np.array(sizes, np.int64) / float(total), total, np.array(sizes, np.int64))


def _greedy(weights: NDArray[np.float64], size: int, available: NDArray[np.int64]) -> BlendIndices:
    dataset, sample = np.empty(size, np.int16), np.empty(size, np.int64)
    taken, behind = np.zeros(len(weights)), np.empty(len(weights))
    left = available.tolist()
    for position in range(size):
        np.multiply(weights, max(position, 1.0), out=behind)
        np.subtract(behind, taken, out=behind)
        chosen = int(behind.argmax())
        dataset[position], sample[position] = chosen, taken[chosen]
        taken[chosen] += 1
        left[chosen] -= 1
        if not left[chosen]:
            taken[chosen] = np.inf  # never behind again
    return BlendIndices(dataset, sample)
