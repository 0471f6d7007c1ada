"""Selects the sentences of each sample: consecutive sentences of a document up to a length that is sometimes drawn shorter.

Equal to build_mapping of megatron-core's native helper (megatron/core/datasets/helpers.cpp), draw by draw. Lengths come
from mt19937, which numpy has; the order of samples comes from mt19937_64, which numpy lacks.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

LONG_SENTENCE = 512
"""Tokens. A document of several sentences is left out if one sentence is longer."""
_BLOCK = 1 << 14


def build_mapping(
    documents: NDArray[np.int64],
    lengths: NDArray[np.int32],
    samples: int | None,
    longest: int,
    short_probability: float,
    seed: int,
    least_sentences: int,
) -> NDArray[np.int64]:
    """Return int64 [n, 3]: the first sentence of each sample, the sentence after its last, and its largest number of tokens.

    documents: the first sentence of each document of this part, and the end of the last document. lengths: of every
    sentence.
    samples: the least number, rounded up to whole epochs; None: one epoch. short_probability: of a shorter sample.
    """
    targets = _targets(longest, short_probability, seed)
    epoch: list[tuple[int, int]] = []
    for first, last in pairwise(documents.tolist()):
        sentences = last - first
        too_long = sentences > 1 and (lengths[first:last] > LONG_SENTENCE).any()
        if sentences >= least_sentences and not too_long:
            epoch.append((first, last))
    found: list[tuple[int, int, int]] = []
    sizes = lengths.tolist()
    while True:
        before = len(found)
        for first, last in epoch:
            found += _of_document(first, last, sizes, least_sentences, targets)
        if samples is None or len(found) >= samples or len(found) == before:
            break
    mapping = np.array(found, np.int64).reshape(-1, 3)
    order = _shuffled(len(mapping), seed + 1)
    return mapping[order]


def _of_document(
    first: int, last: int, sizes: list[int], least: int, targets: Iterator[int]
) -> Iterator[tuple[int, int, int]]:
    target = next(targets)
    start, length = first, 0
    for sentence in range(first, last):
        length += sizes[sentence]
        left = last - sentence - 1
        full = length >= target and left > 1 and sentence + 1 - start >= least
        if full or not left:
            yield start, sentence + 1, target
            start, length, target = sentence + 1, 0, next(targets)


def _targets(longest: int, short_probability: float, seed: int) -> Iterator[int]:
    """Yield target lengths: one at the start of each document, and one after each sample."""
    one_in = round(1 / short_probability) if short_probability else 0
    random = np.random.RandomState(seed)
    while True:
        if not one_in:
            yield longest
            continue
        for drawn in random.randint(0, 1 << 32, _BLOCK, np.uint32).tolist():
            yield 2 + drawn % (longest - 1) if drawn % one_in == 0 else longest


def _shuffled(count: int, seed: int) -> list[int]:
    order, random = list(range(count)), mt19937_64(seed)
    for last in range(count - 1, 0, -1):
        other = next(random) % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def mt19937_64(seed: int) -> Iterator[int]:
    """The 64-bit Mersenne Twister that the C++ standard defines (ISO C++ [rand.predef]; Matsumoto and Nishimura)."""
    size, shift, mask, upper = 312, 156, (1 << 64) - 1, -1 << 31 & (1 << 64) - 1
    state = [seed]
    for number in range(1, size):
        state.append(6364136223846793005 * (state[-1] ^ state[-1] >> 62) + number & mask)
    while True:
        for place in range(size):
            mixed = state[place] & upper | state[(place + 1) % size] & ~upper & mask
            state[place] = (
                state[(place + shift) % size]
                ^ mixed >> 1
                ^ (0xB5026F5AA96619E9 if mixed & 1 else 0)
            )
        for value in state:
            value ^= value >> 29 & 0x5555555555555555
            value ^= value << 17 & 0x71D67FFFEDA60000
            value ^= value << 37 & 0xFFF7EEE000000000
            yield value ^ value >> 43
