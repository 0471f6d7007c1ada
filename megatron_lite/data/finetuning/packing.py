"""Assigns whole examples to samples: best fit by decreasing length, within a window of the shuffled order."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW = 4096
"""Number of examples packed together. One window for all examples would place equal lengths side by side in training."""


def epochs(
    members: NDArray[np.int64], sizes: NDArray[np.int64], room: int, seed: int
) -> Iterator[list[list[int]]]:
    """Yield the samples of each epoch, without end. A sample is a list of example numbers; an epoch has every member once.

    sizes: tokens of every example, at most `room`, the tokens of a sample.
    """
    random = np.random.RandomState(seed)
    while True:
        order = random.permutation(members)
        packs: list[list[int]] = []
        for start in range(0, len(order), WINDOW):
            window = order[start : start + WINDOW]
            # Pack the longest examples first.
            found = pack(window[np.argsort(-sizes[window], kind="stable")].tolist(), sizes, room)
            packs += [found[number] for number in random.permutation(len(found))]
        yield packs


def pack(order: Sequence[int], sizes: NDArray[np.int64], room: int) -> list[list[int]]:
    """Put each example in turn into the sample with the least sufficient room, or into a new sample."""
    packs: list[list[int]] = []
    left: list[tuple[int, int]] = []  # (room left, number of the sample), in order
    for number in order:
        size = int(sizes[number])
        place = bisect_left(left, (size, 0))
        if place < len(left):
            free, chosen = left.pop(place)
        else:
            free, chosen = room, len(packs)
            packs.append([])
        packs[chosen].append(number)
        insort(left, (free - size, chosen))
    return packs


def shuffled_epochs(
    members: NDArray[np.int64], samples: int | None, seed: int
) -> NDArray[np.int64]:
    """Return the members of epoch after epoch, each in another order. samples: number of results; None: one epoch."""
    random, drawn = np.random.RandomState(seed), len(members) if samples is None else samples
    orders = [random.permutation(members) for _ in range(-(-drawn // len(members)))]
    return np.concatenate(orders)[:drawn]
