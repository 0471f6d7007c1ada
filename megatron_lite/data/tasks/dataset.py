"""The order of a task's samples: epoch after epoch, each in whole batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.tasks.examples import Example
from megatron_lite.data.tasks.samples import Sequences, TaskSample


@dataclass(frozen=True)
class TaskDataset:
    """Tokens are made when a sample is asked for. Thread-safe: reading changes nothing."""

    examples: Sequence[Example]
    sequences: Sequences
    order: NDArray[np.int64]
    """Of each sample the number of its example; -1 - number for one that fills a batch up and doesn't count."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> TaskSample:
        number = int(self.order[index])
        if number >= 0:
            return self.sequences.sample(self.examples[number])
        return self.sequences.sample(self.examples[-1 - number])._replace(counts=0)


def epoch_samples(examples: int, batch: int, *, keep_last: bool) -> int:
    """Samples of an epoch. batch: samples of a step. keep_last: whether the last ones, too few for a batch, make one too."""
    return (-(-examples // batch) if keep_last else examples // batch) * batch


def shuffled(examples: int, batch: int, epochs: int, seed: int, *, keep_last: bool) -> NDArray[np.int64]:
    """Of each epoch as torch's DistributedSampler in Megatron's tasks draws it: torch.randperm, seeded with seed + epoch."""
    import torch

    each, orders = epoch_samples(examples, batch, keep_last=keep_last), []
    for epoch in range(epochs):
        drawn = torch.randperm(examples, generator=torch.Generator().manual_seed(seed + epoch)).numpy()
        orders.append(filled(drawn[:each], each))
    return np.concatenate(orders) if orders else np.empty(0, np.int64)


def filled(order: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """The same with samples at its end that don't count, until there are so many."""
    return np.concatenate((order, -1 - np.resize(order, length - len(order))))


def in_order(dataset: TaskDataset, batch: int) -> TaskDataset:
    """Every example once, in whole batches."""
    count = len(dataset.examples)
    return replace(dataset, order=filled(np.arange(count), epoch_samples(count, batch, keep_last=True)))
