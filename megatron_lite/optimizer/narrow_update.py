"""Updates ranges whose state is kept in fewer than 32 bits: block by block, in float32."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.optimizer.algorithm import Rates, Update
from megatron_lite.optimizer.ranges import FlatRange

BLOCK = 1 << 24
"""Elements whose state exists in float32 at a time."""


class _Piece(NamedTuple):
    """A part of a range."""

    whole: FlatRange
    first: int
    last: int


@dataclass(frozen=True)
class _Block:
    """Some pieces with their state in float32."""

    update: Update
    narrow: list[Tensor]
    wide: list[Tensor]
    """The same state in float32, in memory that all blocks share."""


class NarrowUpdate:
    """Widens the state of each block, updates the block, and rounds the state again."""

    def __init__(
        self,
        make: Callable[[Sequence[FlatRange]], Update],
        ranges: Sequence[FlatRange],
        state: Sequence[str],
    ) -> None:
        """make: returns the update of ranges with a float32 state. state: names of its tensors."""
        narrow = [name for name in state if ranges[0].tensors[name].dtype != torch.float32]
        most = min(BLOCK, sum(item.elements for item in ranges))
        device = ranges[0].master.device
        memory = {name: torch.empty(most, device=device) for name in narrow}
        self._blocks = [_block(pieces, memory, make) for pieces in _blocks(ranges)]

    def step(self, rates: Rates, factor: float) -> None:
        """Update the masters."""
        for block in self._blocks:
            torch._foreach_copy_(block.wide, block.narrow)
            block.update.step(rates, factor)
            torch._foreach_copy_(block.narrow, block.wide)

    def continue_after(self, steps: int) -> None:
        """Set the numbers of steps."""
        for block in self._blocks:
            block.update.continue_after(steps)


def _blocks(ranges: Sequence[FlatRange]) -> Iterator[list[_Piece]]:
    """Yield the pieces of the ranges, in blocks of at most BLOCK elements."""
    block: list[_Piece] = []
    room = BLOCK
    for item in ranges:
        first = 0
        while first < item.elements:
            last = min(first + room, item.elements)
            block.append(_Piece(item, first, last))
            room -= last - first
            first = last
            if not room:
                yield block
                block, room = [], BLOCK
    if block:
        yield block


def _block(
    pieces: Sequence[_Piece],
    memory: dict[str, Tensor],
    make: Callable[[Sequence[FlatRange]], Update],
) -> _Block:
    """memory: for the float32 state, by name."""
    parts: list[FlatRange] = []
    narrow: list[Tensor] = []
    wide: list[Tensor] = []
    start = 0
    for item, first, last in pieces:
        tensors = {name: tensor[first:last] for name, tensor in item.tensors.items()}
        end = start + last - first
        for name, whole in memory.items():
            narrow.append(tensors[name])
            wide.append(whole[start:end])
            tensors[name] = whole[start:end]
        gradient = item.gradient[first:last]
        own = item.start + first, item.start + last
        parts.append(FlatRange(item.info, *own, tensors, gradient))
        start = end
    return _Block(make(parts), narrow, wide)
