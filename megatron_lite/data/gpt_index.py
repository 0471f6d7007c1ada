"""Which tokens make sample i: the three indices that Megatron builds from the lengths of the documents, the seed and a size.

    document index   int32[documents · epochs]   documents in the order in which they are laid end to end
    sample index     [samples + 1, 2]             where each sample starts there: (entry of the document index, token in it)
    shuffle index    uint32[samples]              samples in the order in which they are drawn

Equal to those of megatron-core 0.16 (`gpt_dataset.py`, `helpers.cpp`), which draws from one numpy RandomState in this order.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SEPARATE_BELOW = 0.80
"""The last epoch is shuffled for itself when less than this part of it is drawn."""


class Indices(NamedTuple):
    document: NDArray[np.int32]
    sample: NDArray[np.int32 | np.int64]
    shuffle: NDArray[np.uint32 | np.int64]


def build_indices(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], seq_length: int, samples: int | None, seed: int
) -> Indices:
    """The indices of one split.

    lengths: tokens of every document of the dataset. documents: those of the split; they have a token at least.
    seq_length: tokens that a sample trains on; each draws one more, which is the next one's first.
    samples: how many will be drawn; the documents are repeated until there are as many. None: one epoch.
    """
    per_epoch = int(np.sum(lengths[documents], dtype=np.int64))
    epochs = 1 if samples is None else max(1, -(-(samples * seq_length + 1) // per_epoch))
    before_last = ((epochs - 1) * per_epoch - 1) // seq_length
    separate = False
    if samples is not None and epochs > 1:
        separate = samples - before_last < int(_SEPARATE_BELOW * ((per_epoch - 1) // seq_length))
    random = np.random.RandomState(seed)
    if separate:
        order = np.concatenate((_shuffled(documents, epochs - 1, random), _shuffled(documents, 1, random)))
    else:
        order = _shuffled(documents, epochs, random)
    starts = _sample_index(lengths, order, seq_length)
    return Indices(order, starts, _shuffle_index(before_last if separate else None, len(starts) - 1, random))


def _shuffled(documents: NDArray[np.int32], epochs: int, random: np.random.RandomState) -> NDArray[np.int32]:
    order = np.tile(documents, epochs)
    random.shuffle(order)
    return order


def _sample_index(
    lengths: NDArray[np.int32], order: NDArray[np.int32], seq_length: int
) -> NDArray[np.int32 | np.int64]:
    """Sample k starts at token k · seq_length of all documents in order; what is left at the end makes no sample."""
    sizes = lengths[order]
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1])
    places = np.arange((total - 1) // seq_length + 1, dtype=np.int64) * seq_length
    entries = np.searchsorted(ends, places, side="right")
    offsets = places - (ends[entries] - sizes[entries])
    # Megatron starts in the first document even if that has no tokens; the sample is the same.
    entries[0] = 0
    largest = max(len(order), int(lengths.max()))
    return np.stack((entries, offsets), axis=1).astype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


def _shuffle_index(
    before_last: int | None, samples: int, random: np.random.RandomState
) -> NDArray[np.uint32 | np.int64]:
    """before_last: samples ahead of an epoch that is shuffled for itself; None where there is none."""
    dtype: type[np.uint32 | np.int64] = np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64
    index: NDArray[np.uint32 | np.int64] = np.arange(samples, dtype=dtype)
    random.shuffle(index[:before_last])
    if before_last is not None:
        random.shuffle(index[before_last:])
    return index
