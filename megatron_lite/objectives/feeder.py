"""Microbatches of a rank, from its batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron_lite.data.batches import Batch
from megatron_lite.models.batch import Microbatch
from megatron_lite.settings.config import Settings

Convert = Callable[[Batch, Settings], Microbatch]
"""See Objective.microbatch."""


@dataclass(frozen=True)
class Feeder:
    """Converts a rank's batch to microbatches on its device."""

    convert: Convert
    settings: Settings
    device: torch.device
    dp: int
    dp_rank: int

    def updates(self, consumed: int, batch: Batch) -> Iterator[list[Microbatch]]:
        """Yield the microbatches of each update that a step makes: here one update. Collective.

        A subclass may make them with the weights of the moment. consumed: number of samples before the batch.
        """
        del consumed
        yield self.microbatches(batch)

    def microbatches(self, batch: Batch) -> list[Microbatch]:
        """Return the microbatches of a batch."""
        return list(self._microbatches(batch))

    def _microbatches(self, batch: Batch) -> Iterator[Microbatch]:
        count = len(next(iter(batch.values())))
        for number in range(count):
            arrays = {name: rows[number] for name, rows in batch.items()}
            made = self.convert(arrays, self.settings)
            index = number * self.dp + self.dp_rank
            yield self.completed(made.numbered(index).to(self.device), arrays)

    def completed(self, made: Microbatch, arrays: Batch) -> Microbatch:
        """Return a microbatch on its device with what is computed of its arrays there. A subclass may compute something."""
        del arrays
        return made
