"""The order of a task's samples: epochs of whole batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.tasks.examples import Example
from megatron_lite.data.tasks.samples import Sequences, TaskSample


@dataclass(frozen=True)
class TaskDataset:
    """The samples of a task. A sample is tokenized when it is requested. Thread-safe: reading changes nothing."""

    examples: Sequence[Example]
    sequences: Sequences
    order: NDArray[np.int64]
    """The number of each sample's example; -1 - number for a sample that only fills up a batch and doesn't count."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> TaskSample:
        number = int(self.order[index])
        if number >= 0:
            return self.sequences.sample(self.examples[number])
        return self.sequences.sample(self.examples[-1 - number])._replace(counts=0)


def epoch_samples(examples: int, batch: int, *, keep_last: bool) -> int:
    """Return the samples of an epoch. batch: samples of a step.

    keep_last: fill up the last, incomplete batch instead of dropping it.
    """
    return (-(-examples // batch) if keep_last else examples // batch) * batch


def shuffled(
    examples: int, batch: int, epochs: int, seed: int, *, keep_last: bool
) -> NDArray[np.int64]:
    """Return the order of all epochs, as torch's DistributedSampler draws it in Megatron's tasks.

    It is torch.randperm, seeded with seed + epoch.
    """
    import torch

    each, orders = epoch_samples(examples, batch, keep_last=keep_last), []
    for epoch in range(epochs):
        drawn = torch.randperm(
            examples, generator=torch.Generator().manual_seed(seed + epoch)
        ).numpy()
        orders.append(filled(drawn[:each], each))
    return np.concatenate(orders) if orders else np.empty(0, np.int64)


def filled(order: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Append samples that don't count, up to the length."""
    # Negative numbers mark samples that don't count.
    return np.concatenate((order, -1 - np.resize(order, length - len(order))))


def in_order(dataset: TaskDataset, batch: int) -> TaskDataset:
    """Return the dataset with every example once, in whole batches."""
    count = len(dataset.examples)
    return replace(
        dataset, order=filled(np.arange(count), epoch_samples(count, batch, keep_last=True))
    )
