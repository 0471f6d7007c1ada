"""Global batches by the number of consumed samples. They are the same in every layout, and a resume needs no other state.

Micro-batch j of data-parallel rank r holds b samples from consumed + (j · dp + r) · b on: Megatron's `single` loader.
"""

import queue
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from formats.errors import CorruptCheckpoint
from megaconv.errors import LayoutError, UsageError
from megatron_lite.data.samples import Dataset

if TYPE_CHECKING:
    import torch


Batch = Mapping[str, "torch.Tensor"]
"""This rank's part of a global batch: the arrays of a sample by name, each [microbatches, micro_batch_size, ...]."""


@dataclass(frozen=True)
class GlobalBatches:
    """The global batches of a dataset; `at` returns this rank's part of one."""

    dataset: Dataset
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    vocab_size: int
    """Vocabulary size of the tokenizer. A larger token in the data means that another tokenizer made the data."""
    tokens: Sequence[str] = ("tokens", "labels")
    """The arrays of a sample that contain tokens."""
    threads: int = 1
    """Samples that are read at the same time. More than one helps if samples come from a store."""

    def at(self, consumed: int, global_batch_size: int) -> Batch:
        """Return the batch of samples [consumed, consumed + global_batch_size).

        Raises LayoutError if the ranks can't share it evenly, UsageError if the dataset ends before, CorruptCheckpoint
        for a token outside the tokenizer's vocabulary.
        """
        import torch

        numbers = self.samples_at(consumed, global_batch_size)
        if consumed + global_batch_size > len(self.dataset):
            raise UsageError(
                f"samples {consumed:,} to {consumed + global_batch_size:,} are asked for, the dataset has "
                f"{len(self.dataset):,}; give fewer iterations, or corpora with weights, which are repeated"
            )
        samples = self._samples(numbers)
        stacked = {}
        for name in samples[0]:
            rows = np.stack([sample[name] for sample in samples])
            stacked[name] = rows.reshape(
                len(samples) // self.micro_batch_size, self.micro_batch_size, *rows.shape[1:]
            )
        largest = max((int(stacked[name].max(initial=0)) for name in self.tokens), default=0)
        if largest >= self.vocab_size:
            raise CorruptCheckpoint(
                f"the data has token {largest}, the tokenizer {self.vocab_size:,} tokens; it was preprocessed with another one"
            )
        return {name: torch.from_numpy(rows) for name, rows in stacked.items()}

    def _samples(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        if self.threads == 1:
            return [self.dataset[number]._asdict() for number in numbers]
        with ThreadPoolExecutor(self.threads) as pool:
            return [sample._asdict() for sample in pool.map(self.dataset.__getitem__, numbers)]

    def samples_at(self, consumed: int, global_batch_size: int) -> list[int]:
        """Return the numbers of this rank's samples, micro-batch by micro-batch. Raises LayoutError."""
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
    """Yield (consumed, batch) for every (consumed, global batch size) of steps. A thread makes `ahead` batches in advance.

    An error while making a batch is raised in place of that batch. Closing the generator ends the thread.
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
