"""Chooses the rows that are computed in one pass, and pads them to one length."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from megatron_lite.inference.slots import Feed

T = TypeVar("T")
TOKENS = 8192
"""The most tokens of a pass over whole rows, padding included."""


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return int64 [rows, longest]. Padding is at the end, where causal attention does not reach it.

    Padding repeats the row's own last token. Another token's values, if they are NaN, would get into the row's sums.
    """
    longest = max(len(row) for row in rows)
    padded = []
    for row in rows:
        padding = [row[-1]] * (longest - len(row))
        padded.append([*row, *padding])
    return torch.tensor(padded)


def grouped(rows: Iterable[T], count: int) -> Iterator[list[T]]:
    """Yield the rows in groups of `count`; the last one may be smaller."""
    remaining = iter(rows)
    while group := list(islice(remaining, count)):
        yield group


def fitting(feeds: Sequence[Feed], length: int, *, pads: bool) -> Iterator[list[int]]:
    """Yield the numbers of feeds that can be computed together.

    These are all feeds if every slot has room for the padding, else the feeds of one length.
    pads: whether the cache ignores padding.
    """
    if not feeds:
        return
    longest = max(len(feed.tokens) for feed in feeds)
    if pads and all(feed.start + longest <= length for feed in feeds):
        yield list(range(len(feeds)))
        return
    for size in sorted({len(feed.tokens) for feed in feeds}):
        yield [number for number, feed in enumerate(feeds) if len(feed.tokens) == size]


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield groups of row numbers of similar length, with at most `most` tokens including padding."""
    group: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if group and (len(group) + 1) * lengths[number] > most:
            yield group
            group = []
        if lengths[number] > 0:
            group.append(number)
    if group:
        yield group
