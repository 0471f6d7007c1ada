"""`--finetune-data`: samples of whole examples, none of which sees another."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megatron_lite.data.corpora import parse_split, part_of
from megatron_lite.data.finetuning.examples import PairPieces, Pieces
from megatron_lite.data.finetuning.packing import epochs
from megatron_lite.data.samples import Dataset, Sample


class FinetuneDataset:
    """What doesn't fill a sample counts for nothing."""

    def __init__(
        self, pieces: Pieces, members: NDArray[np.int64], seq_length: int, samples: int | None, seed: int
    ) -> None:
        """members: numbers of the pieces that belong to this part. samples: how many will be drawn; None: one epoch."""
        self._pieces, self._seq_length = pieces, seq_length
        self._packs: list[list[int]] = []
        self._epochs: list[int] = []
        """Where each ends."""
        for packs in epochs(members, pieces.ends - pieces.starts - 1, seq_length, seed):
            self._packs += packs
            self._epochs.append(len(self._packs))
            if samples is None or len(self._packs) >= samples:
                break

    def __len__(self) -> int:
        return len(self._packs)

    @property
    def epoch_samples(self) -> int:
        """Of the first one."""
        return self._epochs[0]

    def __getitem__(self, index: int) -> Sample:
        tokens, labels, position_ids = (np.zeros(self._seq_length, np.int64) for _ in range(3))
        loss_mask = np.zeros(self._seq_length, np.float32)
        documents = np.full(self._seq_length, len(self._packs[index]), np.int32)  # the rest is one of its own
        examples, start = self._pieces.examples, 0
        for ordinal, number in enumerate(self._packs[index]):
            first, last = int(self._pieces.starts[number]), int(self._pieces.ends[number])
            place = slice(start, start + last - first - 1)
            tokens[place] = examples.tokens[first : last - 1]
            labels[place] = examples.tokens[first + 1 : last]
            loss_mask[place] = examples.learned[first + 1 : last]
            position_ids[place] = np.arange(last - first - 1)
            documents[place] = ordinal
            start = place.stop
        position_ids[start:] = np.arange(self._seq_length - start)
        return Sample(tokens, labels, loss_mask, position_ids, documents)


class PairSample(NamedTuple):
    """The chosen answer in the first row, the rejected one in the second."""

    tokens: NDArray[np.int64]
    """[2, seq_length]"""
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    reference: NDArray[np.float64]
    """[2]: their log-probabilities under the reference model; empty where these aren't known yet."""


@dataclass(frozen=True)
class PairDataset:
    """`--finetune-data` of pairs of answers: each sample is one pair, its answers as two rows."""

    pieces: PairPieces
    order: NDArray[np.int64]
    """Of each sample the number of its pair."""
    epoch_samples: int
    seq_length: int
    reference: NDArray[np.float64] | None = None
    """[pairs, 2]: log-probabilities under the reference model, where they are known."""

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> PairSample:
        number = int(self.order[index])
        tokens, labels = np.zeros((2, 2, self.seq_length), np.int64)
        loss_mask = np.zeros((2, self.seq_length), np.float32)
        examples = self.pieces.examples
        for row, place in enumerate((2 * number, 2 * number + 1)):
            first, last = int(self.pieces.starts[place]), int(self.pieces.ends[place])
            inside = slice(last - first - 1)
            tokens[row, inside] = examples.tokens[first : last - 1]
            labels[row, inside] = examples.tokens[first + 1 : last]
            loss_mask[row, inside] = examples.learned[first + 1 : last]
        known = np.zeros(0) if self.reference is None else self.reference[number]
        return PairSample(tokens, labels, loss_mask, known)


def pair_dataset(
    pieces: PairPieces, members: NDArray[np.int64], seq_length: int, samples: int | None, seed: int
) -> PairDataset:
    """Shuffled anew in each epoch. members, samples: as FinetuneDataset takes them."""
    random, drawn = np.random.RandomState(seed), len(members) if samples is None else samples
    orders = [random.permutation(members) for _ in range(-(-drawn // len(members)))]
    return PairDataset(pieces, np.concatenate(orders)[:drawn], len(members), seq_length)


def split_datasets(
    pieces: Pieces, valid: Pieces | None, split: str | None, seq_length: int, seed: int, samples: Sequence[int | None]
) -> list[Dataset | None]:
    """For training, evaluation and test. All of `pieces` is trained on unless split says otherwise; valid: for evaluation.

    Raises CorruptCheckpoint where nothing can be learned.
    """
    parts = parse_split(split or "1")
    found: list[Dataset | None] = []
    for place, (part, count) in enumerate(zip(parts, samples, strict=True)):
        source = valid if place == 1 and valid is not None else pieces
        part = (0.0, 1.0) if source is valid else part
        members = part_of(part, len(source)) if part is not None and count != 0 else np.empty(0, np.int32)
        make = pair_dataset if isinstance(source, PairPieces) else FinetuneDataset
        made = make(source, members.astype(np.int64), seq_length, count, seed) if len(members) else None  # type: ignore[arg-type]
        found.append(made)
    if not len(pieces):
        raise CorruptCheckpoint(
            f"--finetune-data: nothing that is to be learned lies in the first {seq_length} tokens of an example; "
            "--seq-length takes more"
        )
    return found


def samples_of(pieces: Pieces, seq_length: int, seed: int, split: str | None, count: int) -> int:
    """Of the first `count` epochs of the part to train on."""
    part = parse_split(split or "1")[0]
    members = part_of(part, len(pieces)) if part is not None else np.empty(0, np.int32)
    if isinstance(pieces, PairPieces):
        return count * len(members)
    made = epochs(members.astype(np.int64), pieces.ends - pieces.starts - 1, seq_length, seed)
    return sum(len(packs) for packs in islice(made, count))
