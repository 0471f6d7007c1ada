"""`--finetune-data`: samples of whole examples, which don't attend to each other."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.finetuning.packing import epochs
from megatron_lite.data.finetuning.pieces import Pieces
from megatron_lite.data.samples import Sample


@dataclass(frozen=True)
class Part:
    """An example in a sample: tokens [first, last) of all examples, whose inputs are from `start` on."""

    first: int
    last: int
    start: int

    @property
    def count(self) -> int:
        """Number of inputs. A token's label is the next token, so an example of n tokens has n - 1 inputs."""
        return self.last - self.first - 1

    @property
    def place(self) -> slice:
        """The inputs' place in the sample."""
        return slice(self.start, self.start + self.count)


class FinetuneDataset:
    """Samples packed from whole examples. Unused positions of a sample don't count in the loss."""

    def __init__(
        self,
        pieces: Pieces,
        members: NDArray[np.int64],
        seq_length: int,
        samples: int | None,
        seed: int,
    ) -> None:
        """members: numbers of the pieces in this part. samples: number to draw; None: one epoch."""
        self._pieces, self._seq_length = pieces, seq_length
        self._packs: list[list[int]] = []
        self._epochs: list[int] = []
        """Number of samples at the end of each epoch."""
        for packs in epochs(members, pieces.ends - pieces.starts - 1, seq_length, seed):
            self._packs += packs
            self._epochs.append(len(self._packs))
            if samples is None or len(self._packs) >= samples:
                break

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def epoch_samples(self) -> int:
        """Number of samples in the first epoch."""
        return self._epochs[0]

    def parts(self, index: int) -> Iterator[Part]:
        """Yield the examples of a sample."""
        start = 0
        for number in self._packs[index]:
            part = Part(int(self._pieces.starts[number]), int(self._pieces.ends[number]), start)
            yield part
            start += part.count

    def __getitem__(self, index: int) -> Sample:
        length = self._seq_length
        tokens = np.zeros(length, np.int64)
        labels = np.zeros(length, np.int64)
        position_ids = np.zeros(length, np.int64)
        loss_mask = np.zeros(length, np.float32)
        # Unused positions form a separate document.
        documents = np.full(length, len(self._packs[index]), np.int32)
        examples = self._pieces.examples
        end = 0
        for ordinal, part in enumerate(self.parts(index)):
            place, count = part.place, part.count
            predicted = slice(part.first + 1, part.last)
            tokens[place] = examples.tokens[part.first : part.last - 1]
            labels[place] = examples.tokens[predicted]
            loss_mask[place] = examples.learned[predicted]
            position_ids[place] = np.arange(count)
            documents[place] = ordinal
            end = place.stop
        position_ids[end:] = np.arange(length - end)
        return Sample(tokens, labels, loss_mask, position_ids, documents)
