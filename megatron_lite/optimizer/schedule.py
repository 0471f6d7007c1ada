"""Hooks that fetch and free sharded parameters around the forward and the backward pass of each unit.

A unit is a layer, the embedding, a norm or the head. While a unit computes, the next one's parameters arrive. All events
come from the order of the units, which is the same on all ranks, so all ranks start the same collectives in the same order.

optimizer/fetching.py decides what each event does. Autograd computes nodes in the reverse order of their creation. So when a
unit's output gets its gradient, the backward passes of all units that were called later are over.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_lite.optimizer.fetching import Fetching
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
        self._backward = False
        in_units = {id(each) for unit in units for each in unit.parameters()}
        outside = [memory[id(each)] for each in chunk.parameters() if id(each) in memory and id(each) not in in_units]  # fmt: skip
        of_shared = [each for module in shared for each in _memory_of(module, memory)]
        self._fetching = Fetching(
            [list(_memory_of(unit, memory)) for unit in units],
            [*outside, *of_shared],
            needs_parameters=[getattr(unit, "gradient_needs_parameters", True) for unit in units],
            ahead=ahead,
        )
        for number, unit in enumerate(units):
            self._hook(number, unit)

    def _hook(self, number: int, unit: nn.Module) -> None:
        def before(*_: object) -> None:
            self._fetching.before_forward(number)

        def after(_: nn.Module, __: object, output: object) -> None:
            self._after_forward(number, output)

        unit.register_forward_pre_hook(before)
        unit.register_forward_hook(after)

    def begin(self, *, backward: bool) -> None:
        """Start a pass."""
        self._backward = backward
        self._fetching.begin(backward=backward)

    def end(self, *, backward_follows: bool) -> None:
        """End a pass: free all parameters, except those that the following backward pass begins with."""
        self._fetching.end(backward_follows=backward_follows)
        self._backward = False

    def _after_forward(self, number: int, output: object) -> None:
        if self._backward:  # recomputed: the backward pass of the unit follows
            return
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, number))  # type: ignore[no-untyped-call]
        self._fetching.after_forward(number)

    def _before_backward(self, number: int, _: Tensor) -> None:
        self._fetching.before_backward(number)


def _memory_of(module: nn.Module, memory: Parameters) -> Iterator[OnDemand]:
    for parameter in module.parameters():
        if id(parameter) in memory:
            yield memory[id(parameter)]
