"""The times at which sharded parameters are fetched and freed: around the forward and the backward pass of each unit.

A unit is a layer, the embedding, a norm or the head. While a unit computes, the next one's parameters arrive. All events
come from the order of the units, which is the same on all ranks, so all ranks start the same collectives in the same order.

Autograd computes nodes in the reverse order of their creation. So when a unit's output gets its gradient, the backward
passes of all units that were called later are over.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_lite.optimizer.shards import OnDemand

Parameters = Mapping[int, OnDemand]
"""id of a parameter -> its memory."""


class Schedule:
    """Fetches and frees the sharded parameters of one chunk."""

    def __init__(
        self,
        chunk: nn.Module,
        units: Sequence[nn.Module],
        shared: Iterable[nn.Module],
        memory: Parameters,
        *,
        ahead: bool,
    ) -> None:
        """Register hooks on the units.

        units: in the order of a forward pass. shared: modules whose parameters other units use too.
        ahead: whether the next unit's parameters are fetched in advance.
        """
        self._ahead = ahead
        self._backward = False
        self._reached = -1
        """The last unit that this forward pass has called. Further tokens call the embedding again."""
        self._units = [_unique(_memory_of(unit, memory)) for unit in units]
        in_units = {id(each) for unit in units for each in unit.parameters()}
        outside = [memory[id(each)] for each in chunk.parameters() if id(each) in memory and id(each) not in in_units]  # fmt: skip
        of_shared = [each for module in shared for each in _memory_of(module, memory)]
        self._held = _unique([*outside, *of_shared])
        """They exist during a whole pass."""
        self._all = _unique(memory.values())
        self._needs_parameters = [
            getattr(unit, "gradient_needs_parameters", True) for unit in units
        ]
        for number, unit in enumerate(units):
            self._hook(number, unit)

    def _hook(self, number: int, unit: nn.Module) -> None:
        def before(*_: object) -> None:
            self._before_forward(number)

        def after(_: nn.Module, __: object, output: object) -> None:
            self._after_forward(number, output)

        unit.register_forward_pre_hook(before)
        unit.register_forward_hook(after)

    def begin(self, *, backward: bool) -> None:
        """Start a pass."""
        self._backward = backward
        self._reached = -1
        for each in self._held:
            each.ready()

    def end(self, *, backward_follows: bool) -> None:
        """End a pass: free all parameters, except those that the following backward pass begins with."""
        kept = self._first_of_backward() if backward_follows else []
        for each in self._all:
            if each.present and not _contains(kept, each):
                each.release()
        self._backward = False

    def _first_of_backward(self) -> list[OnDemand]:
        return [*self._units[-1], *self._held]

    def _before_forward(self, number: int) -> None:
        for each in self._units[number]:
            each.ready()
        is_next = number > self._reached and number + 1 < len(self._units)
        self._reached = max(self._reached, number)
        if self._ahead and is_next and not self._backward:
            for each in self._units[number + 1]:
                each.start()

    def _after_forward(self, number: int, output: object) -> None:
        if self._backward:  # recomputed: the backward pass of the unit follows
            return
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, number))  # type: ignore[no-untyped-call]
        last = number + 1 == len(self._units)
        following = [] if last else self._units[number + 1]
        if not last:
            self._release(self._units[number], following)

    def _before_backward(self, number: int, _: Tensor) -> None:
        if not self._needs_parameters[number]:
            return
        own = self._units[number]
        for each in own:
            each.ready()
        earlier = self._units[number - 1] if number else []
        for later in self._units[number + 1 :]:
            self._release(later, [*own, *earlier])
        if self._ahead and number and self._needs_parameters[number - 1]:
            for each in earlier:
                each.start()

    def _release(self, found: Sequence[OnDemand], still_used: Sequence[OnDemand]) -> None:
        for each in found:
            if each.present and not _contains([*still_used, *self._held], each):
                each.release()


def _memory_of(module: nn.Module, memory: Parameters) -> Iterator[OnDemand]:
    for parameter in module.parameters():
        if id(parameter) in memory:
            yield memory[id(parameter)]


def _unique(found: Iterable[OnDemand]) -> list[OnDemand]:
    return list({id(each): each for each in found}.values())


def _contains(found: Iterable[OnDemand], wanted: OnDemand) -> bool:
    return any(each is wanted for each in found)
