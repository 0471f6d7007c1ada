"""`--finetune-data` of pairs of answers: each sample is one pair, with its answers as two rows."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.finetuning.packing import shuffled_epochs
from megatron_lite.data.finetuning.pieces import PairPieces
from megatron_lite.data.images.places import Images


class PairSample(NamedTuple):
    """The chosen answer in the first row, the rejected one in the second.

    Rated answers: the answer in the first row, that to another question in the second.
    """

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
    good: NDArray[np.float64]
    """[1]: 1 if the first row's answer is good, 0 if it is bad; empty if answers are not rated."""
    images: NDArray[np.int64]
    """The numbers of the first row's images, then those of the second row's, filled up with NO_IMAGE."""
    axes: NDArray[np.int64]
    """[2, seq_length, 3]: frame, row and column of each token; [2, 0, 3] for a model without these positions."""


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

    most_images: int = 0
    """The most images of a pair."""

    def __len__(self) -> int:
        return len(self.order)

    @property
    def images(self) -> Images | None:
        """The images of all answers; None for a model that reads no images."""
        return self.pieces.examples.images

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
        ratings = self.pieces.good
        good = np.zeros(0) if ratings is None else ratings[number : number + 1].astype(np.float64)
        images = self._images(number)
        axes = self._axes(number)
        return PairSample(tokens, labels, loss_mask, lengths, known, margin, good, images, axes)

    def _images(self, number: int) -> NDArray[np.int64]:
        """Return the numbers of a pair's images."""
        if self.images is None:
            return np.zeros(0, np.int64)
        inside = [
            image for first, end in self._read(number) for image in self.images.within(first, end)
        ]
        return self.images.taken([image.number for image in inside], self.most_images)

    def _axes(self, number: int) -> NDArray[np.int64]:
        """Return frame, row and column of the tokens of a pair."""
        if self.images is None or self.images.reader.axes is None:
            return np.zeros((2, 0, 3), np.int64)
        # Unused positions count as a text does.
        axes = np.tile(np.arange(self.seq_length)[:, None], (2, 1, 3))
        for row, (first, end) in enumerate(self._read(number)):
            axes[row, : end - first] = self.images.positions(first, end)
        return axes

    def _read(self, number: int) -> list[tuple[int, int]]:
        """Return the tokens [first, end) of each answer that the model reads."""
        rows = slice(2 * number, 2 * number + 2)
        starts, ends = self.pieces.starts[rows].tolist(), self.pieces.read_ends[rows].tolist()
        return list(zip(starts, ends, strict=True))


def pair_dataset(
    pieces: PairPieces, members: NDArray[np.int64], seq_length: int, samples: int | None, seed: int
) -> PairDataset:
    """Return a dataset of pairs, shuffled anew in each epoch. members, samples: see FinetuneDataset."""
    order = shuffled_epochs(members, samples, seed)
    images = pieces.examples.images
    most = 0
    if images is not None:
        counts = images.counts(pieces.starts, pieces.read_ends).reshape(-1, 2)
        most = int(counts.sum(1).max(initial=0))
    return PairDataset(pieces, order, len(members), seq_length, most_images=most)
