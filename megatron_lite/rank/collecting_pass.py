"""A pass without gradients that collects something from the last stage: inputs of a loss, or a teacher's predictions."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megatron_lite.models.criterion import Criterion
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.payload import Payload

T = TypeVar("T")


class CollectingPass(Criterion, Generic[T]):
    """Collects from each microbatch. It also takes the place of the sums of losses."""

    share = 1.0

    def __init__(self, collect: Callable[[Network, Payload, Pass], T]) -> None:
        self.collect = collect
        self.found: list[T] = []
        """In the order of microbatches; empty except on the last stage."""

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        self.found.append(self.collect(stage, given, run))
        return torch.zeros(()), {}

    def add(self, total: Tensor, found: Mapping[str, Counted]) -> Tensor:
        """Return total unchanged; see LossSum.add."""
        del found
        return total
