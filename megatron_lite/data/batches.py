"""Global batches by the number of samples consumed: the same samples at every layout, and nothing else to save for a resume.

Micro-batch j of data-parallel rank r holds samples consumed + (j · dp + r) · b up to b more: Megatron's `single` loader.
"""

import queue
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from formats.errors import CorruptCheckpoint
from megaconv.errors import LayoutError, UsageError
from megatron_lite.data.samples import Dataset

if TYPE_CHECKING:
    import torch


Batch = Mapping[str, "torch.Tensor"]
"""This rank's part of a global batch: what samples hold, by its name there, each [microbatches, micro_batch_size, ...]."""


@dataclass(frozen=True)
class GlobalBatches:
    dataset: Dataset
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    vocab_size: int
    """Of the tokenizer; a larger token in the data means that it was made with another one."""
    tokens: Sequence[str] = ("tokens", "labels")
    """What of a sample is tokens."""

    def at(self, consumed: int, global_batch_size: int) -> Batch:
        """The batch of samples [consumed, consumed + global_batch_size).

        Raises LayoutError when the ranks can't share it evenly, UsageError when the dataset ends before,
        CorruptCheckpoint for a token that the tokenizer doesn't have.
        """
        import torch

        numbers = self.samples_at(consumed, global_batch_size)
        if consumed + global_batch_size > len(self.dataset):
            raise UsageError(
                f"samples {consumed:,} to {consumed + global_batch_size:,} are asked for, the dataset has "
                f"{len(self.dataset):,}; give fewer iterations, or corpora with weights, which are repeated"
            )
        samples = [self.dataset[number]._asdict() for number in numbers]
        stacked = {}
        for name in samples[0]:
            rows = np.stack([sample[name] for sample in samples])
            stacked[name] = rows.reshape(len(samples) // self.micro_batch_size, self.micro_batch_size, *rows.shape[1:])
        largest = max(int(stacked[name].max()) for name in self.tokens)
        if largest >= self.vocab_size:
            raise CorruptCheckpoint(
                f"the data has token {largest}, the tokenizer {self.vocab_size:,} tokens; it was preprocessed with another one"
            )
        return {name: torch.from_numpy(rows) for name, rows in stacked.items()}

    def samples_at(self, consumed: int, global_batch_size: int) -> list[int]:
        """Numbers of this rank's samples, micro-batch by micro-batch. Raises LayoutError."""
        together = self.micro_batch_size * self.dp_size
        if global_batch_size % together:
            raise LayoutError(
                f"a global batch of {global_batch_size} samples can't be divided over {self.dp_size} data-parallel ranks "
                f"in micro-batches of {self.micro_batch_size}: make it a multiple of {together}"
            )
        first = consumed + self.dp_rank * self.micro_batch_size
        starts = range(first, first + global_batch_size, together)
        return [start + place for start in starts for place in range(self.micro_batch_size)]


def prefetch(
    batches: GlobalBatches, steps: Iterable[tuple[int, int]], ahead: int = 1
) -> Generator[tuple[int, Batch], None, None]:
    """(consumed, batch) for every (consumed, global batch size) of steps; a thread makes `ahead` of them in advance.

    An error while making a batch is raised where that batch would have been returned. Closing ends the thread.
    """
    made: queue.Queue[tuple[int, Batch] | BaseException | None] = queue.Queue(ahead)
    stopped = threading.Event()

    def hand_over(item: tuple[int, Batch] | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                made.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for consumed, size in steps:
                hand_over((consumed, batches.at(consumed, size)))
                if stopped.is_set():
                    return
            hand_over(None)
        except BaseException as error:  # the consumer raises it
            hand_over(error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
