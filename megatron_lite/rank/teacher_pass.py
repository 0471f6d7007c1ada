"""The pass of a teacher: its predictions of each microbatch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.criterion import Criterion
from megatron_lite.models.network_interface import Counted, Network
from megatron_lite.models.passes import Pass
from megatron_lite.models.teaching import Teaching
from megatron_lite.parallel.payload import Payload


class TeacherPass(Criterion):
    """Collects a teacher's predictions. It also takes the place of the sums of losses."""

    share = 1.0

    def __init__(self) -> None:
        self.found: list[Teaching] = []
        """In the order of microbatches; empty except on the last stage."""

    def loss(
        self, stage: Network, given: Payload, run: Pass
    ) -> tuple[Tensor, Mapping[str, Counted]]:
        assert isinstance(stage, ModelChunk)
        self.found.append(stage.teaching(given))
        return torch.zeros(()), {}

    def add(self, total: Tensor, found: Mapping[str, Counted]) -> Tensor:
        """Return total unchanged; see LossSum.add."""
        del found
        return total
