"""`--finetune-data`: samples of whole examples, which don't attend to each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.finetuning.packing import epochs
from megatron_lite.data.finetuning.pieces import PairPieces, Pieces
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


class PairSample(NamedTuple):
    """The chosen answer in the first row, the rejected one in the second."""

    tokens: NDArray[np.int64]
    """[2, seq_length]."""
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    lengths: NDArray[np.int64]
    """[2]: tokens of each row, with its last label."""
    reference: NDArray[np.float64]
    """[2]: log-probabilities under the reference model; empty if they are not known yet."""
    margin: NDArray[np.float64]
    """[1]; empty if no pair of the data has a margin."""


@dataclass(frozen=True)
class PairDataset:
    """`--finetune-data` of pairs of answers: each sample is one pair, with its answers as two rows."""

    pieces: PairPieces
    order: NDArray[np.int64]
    """The number of each sample's pair."""
    epoch_samples: int
    seq_length: int
    reference: NDArray[np.float64] | None = None
    """[pairs, 2]: log-probabilities under the reference model; None if they are not known."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> PairSample:
        number = int(self.order[index])
        shape = 2, self.seq_length
        tokens = np.zeros(shape, np.int64)
        labels = np.zeros(shape, np.int64)
        loss_mask = np.zeros(shape, np.float32)
        lengths = np.zeros(2, np.int64)
        examples = self.pieces.examples
        for row in (0, 1):
            answer = 2 * number + row
            first = int(self.pieces.starts[answer])
            last = int(self.pieces.ends[answer])
            count = last - first - 1
            # Each token but the last one predicts the next. A single token has no label, and gets a score all the same.
            read = slice(first, first + max(count, 1))
            predicted = slice(first + 1, last)
            filled = row, slice(count)
            lengths[row] = last - first
            tokens[row, : max(count, 1)] = examples.tokens[read]
            labels[filled] = examples.tokens[predicted]
            loss_mask[filled] = examples.learned[predicted]
        known = np.zeros(0) if self.reference is None else self.reference[number]
        margins = self.pieces.margins
        margin = np.zeros(0) if margins is None else margins[number : number + 1]
        return PairSample(tokens, labels, loss_mask, lengths, known, margin)


def pair_dataset(
    pieces: PairPieces, members: NDArray[np.int64], seq_length: int, samples: int | None, seed: int
) -> PairDataset:
    """Return a dataset of pairs, shuffled anew in each epoch. members, samples: see FinetuneDataset."""
    order = shuffled_epochs(members, samples, seed)
    return PairDataset(pieces, order, len(members), seq_length)


def shuffled_epochs(
    members: NDArray[np.int64], samples: int | None, seed: int
) -> NDArray[np.int64]:
    """Return the members of epoch after epoch, each in another order. samples: number of results; None: one epoch."""
    random, drawn = np.random.RandomState(seed), len(members) if samples is None else samples
    orders = [random.permutation(members) for _ in range(-(-drawn // len(members)))]
    return np.concatenate(orders)[:drawn]
