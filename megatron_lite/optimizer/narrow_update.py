"""Updates ranges whose state is kept in fewer than 32 bits: block by block, in float32."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.optimizer.algorithm import BLOCK, Rates, Update
from megatron_lite.optimizer.ranges import FlatRange

GRADIENT = "gradient"
"""The name of the memory of gradients, beside the names of state."""


class _Piece(NamedTuple):
    """A part of a range."""

    whole: FlatRange
    first: int
    last: int


class _Widened(NamedTuple):
    """Tensors of few bits, and memory in float32 for the same values, which all blocks share."""

    narrow: list[Tensor]
    wide: list[Tensor]

    def widen(self) -> None:
        """Copy the values to float32."""
        if self.narrow:
            torch._foreach_copy_(self.wide, self.narrow)

    def round(self) -> None:
        """Round the float32 values."""
        if self.narrow:
            torch._foreach_copy_(self.narrow, self.wide)


class _Block(NamedTuple):
    """Some pieces with their state and their gradients in float32."""

    update: Update
    state: _Widened
    gradients: _Widened


class NarrowUpdate:
    """Widens the state and the gradients of each block, updates the block, and rounds the state again."""

    def __init__(
        self,
        make: Callable[[Sequence[FlatRange]], Update],
        ranges: Sequence[FlatRange],
        state: Sequence[str],
    ) -> None:
        """make: returns the update of ranges with a float32 state and float32 gradients. state: names of its tensors."""
        narrow = [name for name in state if ranges[0].tensors[name].dtype != torch.float32]
        if any(item.gradient.dtype != torch.float32 for item in ranges):
            narrow.append(GRADIENT)
        most = min(BLOCK, sum(item.elements for item in ranges))
        device = ranges[0].master.device
        memory = {name: torch.empty(most, device=device) for name in narrow}
        self._blocks = [_block(pieces, memory, make) for pieces in _blocks(ranges)]

    def step(self, rates: Rates, factor: float) -> None:
        """Update the masters."""
        for block in self._blocks:
            block.state.widen()
            block.gradients.widen()
            block.update.step(rates, factor)
            block.state.round()

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
    """memory: for the float32 state and gradients, by name."""
    parts: list[FlatRange] = []
    state, gradients = _Widened([], []), _Widened([], [])
    start = 0
    for item, first, last in pieces:
        tensors = {name: tensor[first:last] for name, tensor in item.tensors.items()}
        gradient = item.gradient[first:last]
        end = start + last - first
        for name, whole in memory.items():
            if name == GRADIENT:
                gradient = _float32(gradient, whole[start:end], gradients)
            else:
                tensors[name] = _float32(tensors[name], whole[start:end], state)
        own = item.start + first, item.start + last
        parts.append(FlatRange(item.info, *own, tensors, gradient))
        start = end
    return _Block(make(parts), state, gradients)


def _float32(tensor: Tensor, memory: Tensor, widened: _Widened) -> Tensor:
    """Return the float32 tensor that an update uses: the memory, if the tensor has fewer bits."""
    if tensor.dtype == torch.float32:
        return tensor
    widened.narrow.append(tensor)
    widened.wide.append(memory)
    return memory
