"""Determines the tokens of sample i: Megatron's three indices, from the documents' lengths, the seed and a size.

    document index   int32[documents · epochs]   documents in the order in which they are concatenated
    sample index     [samples + 1, 2]             the start of each sample there: (entry of the document index, token in it)
    shuffle index    uint32[samples]              samples in the order in which they are drawn

Equal to the indices of megatron-core 0.16 (`gpt_dataset.py`, `helpers.cpp`), which draws from one numpy RandomState in
this order.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SEPARATE_BELOW = 0.80
"""The last epoch is shuffled separately if less than this fraction of it is drawn."""


class Indices(NamedTuple):
    """The three indices."""

    document: NDArray[np.int32]
    sample: NDArray[np.int32 | np.int64]
    shuffle: NDArray[np.uint32 | np.int64]


def build_indices(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int32],
    seq_length: int,
    samples: int | None,
    seed: int,
) -> Indices:
    """Return the indices of one split.

    lengths: tokens of every document of the dataset. documents: numbers of the split's documents; at least one has
    tokens.
    seq_length: tokens that a sample trains on; a sample reads one more token, which is the next sample's first token.
    samples: number to draw; the documents are repeated until there are enough. None: one epoch.
    """
    per_epoch = int(np.sum(lengths[documents], dtype=np.int64))
    # Samples read seq_length tokens each, and the last sample reads one more.
    epochs = 1 if samples is None else max(1, -(-(samples * seq_length + 1) // per_epoch))
    # Number of samples that end in the epochs before the last.
    before_last = ((epochs - 1) * per_epoch - 1) // seq_length
    separate = False
    if samples is not None and epochs > 1:
        separate = samples - before_last < int(_SEPARATE_BELOW * ((per_epoch - 1) // seq_length))
    random = np.random.RandomState(seed)
    if separate:
        order = np.concatenate(
            (_shuffled(documents, epochs - 1, random), _shuffled(documents, 1, random))
        )
    else:
        order = _shuffled(documents, epochs, random)
    starts = _sample_index(lengths, order, seq_length)
    return Indices(
        order, starts, _shuffle_index(before_last if separate else None, len(starts) - 1, random)
    )


def _shuffled(
    documents: NDArray[np.int32], epochs: int, random: np.random.RandomState
) -> NDArray[np.int32]:
    order = np.tile(documents, epochs)
    random.shuffle(order)
    return order


def _sample_index(
    lengths: NDArray[np.int32], order: NDArray[np.int32], seq_length: int
) -> NDArray[np.int32 | np.int64]:
    """Return the starts. Sample k starts at token k · seq_length of the concatenated documents; a short rest is not used."""
    sizes = lengths[order]
    ends = np.cumsum(sizes, dtype=np.int64)
    starts = ends - sizes
    total = int(ends[-1])
    samples = (total - 1) // seq_length
    numbers = np.arange(samples + 1, dtype=np.int64)
    places = numbers * seq_length
    entries = np.searchsorted(ends, places, side="right")
    offsets = places - starts[entries]
    # Megatron starts in the first document even if it has no tokens. The sample is the same.
    entries[0] = 0
    longest = int(lengths.max())
    largest = max(len(order), longest)
    fits_int32 = largest <= np.iinfo(np.int32).max
    dtype = np.int32 if fits_int32 else np.int64
    index = np.stack((entries, offsets), axis=1)
    return index.astype(dtype)


def _shuffle_index(
    before_last: int | None, samples: int, random: np.random.RandomState
) -> NDArray[np.uint32 | np.int64]:
    """Return the shuffle index. before_last: samples before a separately shuffled last epoch, or None."""
    dtype: type[np.uint32 | np.int64] = (
        np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64
    )
    index: NDArray[np.uint32 | np.int64] = np.arange(samples, dtype=dtype)
    random.shuffle(index[:before_last])
    if before_last is not None:
        random.shuffle(index[before_last:])
    return index
