"""The turns of a model in any layout: numbers that rank 0 broadcasts, and the feeds and rows in them."""

from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch

from megatron_lite.inference.slots import Feed
from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Grid

_HEAD = 256
"""Numbers of a turn sent in the first broadcast. A second broadcast sends the rest, for example of a long prompt."""


class Turn(IntEnum):
    """The kinds of turns; the first number of each turn."""

    END = 0
    EXTEND = 1
    COPY = 2
    SCORE = 3
    IDLE = 4
    FORGET = 5
    ADAPT = 6
    VERIFY = 7
    DRAFT = 8
    SHOW = 9
    EMBED = 10


def send(words: list[int], grid: Grid) -> None:
    """Broadcast the numbers of a turn from rank 0. Collective with `receive` on the other ranks."""
    world, device = grid.group("world"), grid.device
    if world is None:
        return
    in_head, rest = words[: _HEAD - 1], words[_HEAD - 1 :]
    head = torch.zeros(_HEAD, dtype=torch.int64)
    head[: len(in_head) + 1] = torch.tensor([len(words), *in_head])
    comm.broadcast(head.to(device), 0, world)
    if rest:
        comm.broadcast(torch.tensor(rest, device=device), 0, world)


def receive(grid: Grid) -> list[int]:
    """Return the numbers of a turn that rank 0 sends."""
    world, device = grid.group("world"), grid.device
    head = torch.empty(_HEAD, dtype=torch.int64, device=device)
    comm.broadcast(head, 0, world)
    count, *words = head.tolist()
    if count >= _HEAD:
        rest = torch.empty(count - _HEAD + 1, dtype=torch.int64, device=device)
        comm.broadcast(rest, 0, world)
        words += rest.tolist()
    return words[:count]


def words_of_feeds(feeds: Sequence[Feed]) -> list[int]:
    """Return the numbers of feeds: count, then slot, start and length of each, then all tokens."""
    words = [len(feeds)]
    for feed in feeds:
        words += [feed.slot, feed.start, len(feed.tokens)]
    for feed in feeds:
        words += feed.tokens
    return words


def feeds_of(words: Sequence[int]) -> list[Feed]:
    """Return the feeds that `words_of_feeds` wrote."""
    count = words[0]
    described, tokens = words[1 : 1 + 3 * count], words[1 + 3 * count :]
    slots, starts, lengths = described[0::3], described[1::3], described[2::3]
    rows = _split(tokens, lengths)
    return [
        Feed(slot, start, tuple(row)) for slot, start, row in zip(slots, starts, rows, strict=True)
    ]


def words_of_rows(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the numbers of rows: count, then the length of each, then all tokens."""
    words = [len(rows), *(len(row) for row in rows)]
    for row in rows:
        words += row
    return words


def rows_of(words: Sequence[int]) -> list[list[int]]:
    """Return the rows that `words_of_rows` wrote."""
    count = words[0]
    return _split(words[1 + count :], words[1 : 1 + count])


def _split(words: Sequence[int], lengths: Iterable[int]) -> list[list[int]]:
    """Return consecutive parts of these lengths."""
    parts = []
    start = 0
    for length in lengths:
        parts.append(list(words[start : start + length]))
        start += length
    return parts
