"""The datasets of a run's examples: for training, evaluation and test."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megatron_lite.data.corpora import parse_split, part_of
from megatron_lite.data.finetuning.dataset import FinetuneDataset
from megatron_lite.data.finetuning.image_dataset import ImageDataset
from megatron_lite.data.finetuning.packing import epochs
from megatron_lite.data.finetuning.pair_dataset import pair_dataset
from megatron_lite.data.finetuning.pieces import PairPieces, Pieces
from megatron_lite.data.samples import Dataset

SMALLER_IMAGES = "a smaller size in preprocessor_config.json gives images fewer tokens"


def _dataset(
    source: Pieces, members: NDArray[np.int64], seq_length: int, samples: int | None, seed: int
) -> Dataset:
    if isinstance(source, PairPieces):
        return pair_dataset(source, members, seq_length, samples, seed)
    packed = FinetuneDataset(source, members, seq_length, samples, seed)
    images = source.examples.images
    return packed if images is None else ImageDataset(packed, images)


def split_datasets(
    pieces: Pieces,
    valid: Pieces | None,
    split: str | None,
    seq_length: int,
    seed: int,
    samples: Sequence[int | None],
) -> list[Dataset | None]:
    """Return the datasets for training, evaluation and test. Without a split, all of `pieces` is for training.

    valid: pieces for evaluation. Raises CorruptCheckpoint if there is nothing to learn.
    """
    parts = parse_split(split or "1")
    found: list[Dataset | None] = []
    for place, (part, count) in enumerate(zip(parts, samples, strict=True)):
        source = valid if place == 1 and valid is not None else pieces
        part = (0.0, 1.0) if source is valid else part
        members = (
            part_of(part, len(source)) if part is not None and count != 0 else np.empty(0, np.int32)
        )
        if len(members):
            found.append(_dataset(source, members.astype(np.int64), seq_length, count, seed))
        else:
            found.append(None)
    if not len(pieces):
        raise CorruptCheckpoint(
            f"--finetune-data: nothing that is to be learned lies in the first {seq_length} tokens of an example; "
            f"--seq-length takes more{_about_images(pieces)}"
        )
    return found


def samples_of(pieces: Pieces, seq_length: int, seed: int, split: str | None, count: int) -> int:
    """Return the number of samples in the first `count` epochs of the training part."""
    part = parse_split(split or "1")[0]
    members = part_of(part, len(pieces)) if part is not None else np.empty(0, np.int32)
    if isinstance(pieces, PairPieces):
        return count * len(members)
    made = epochs(members.astype(np.int64), pieces.ends - pieces.starts - 1, seq_length, seed)
    return sum(len(packs) for packs in islice(made, count))


def _about_images(pieces: Pieces) -> str:
    """Return what to do about large images."""
    images = pieces.examples.images
    if images is None or not images.placed:
        return ""
    return f". An image has up to {images.tokens.max():,} tokens; {SMALLER_IMAGES}"
