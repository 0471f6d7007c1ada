"""The first of two passes of a step, for a loss that depends on all microbatches of the step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_lite.models.criterion import Criterion, Outputs
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.payload import Payload


class FirstPass(Criterion):
    """Collects what a criterion needs of each microbatch. It also takes the place of the sums of losses."""

    share = 1.0

    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion
        self.found: list[Outputs] = []
        """In the order of microbatches; empty except on the last stage."""

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        self.found.append(self.criterion.outputs(stage, given, run))
        return torch.zeros(()), {}

    def add(self, total: Tensor, found: Mapping[str, Counted]) -> Tensor:
        """Return total unchanged; see LossSum.add."""
        del found
        return total
