"""What a step or an evaluation adds up on the last stage, and what its means are over."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_lite.models.batch import Microbatch
from megatron_lite.models.network import Counted


def places(batch: Microbatch) -> int:
    """Of how many labels, pairs of rows or examples of a task its loss is the mean where all of them count."""
    if batch.answers is not None:
        return len(batch.answers)
    return batch.tokens.numel() if batch.reference is None else len(batch.tokens) // 2


class LossSum:
    """Losses of a step on the last stage, on the device until the step's end."""

    def __init__(self, names: Sequence[str], device: torch.device, share: float) -> None:
        """share: as Pass has it."""
        self.names, self.share = names, share
        self.sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
        """Of each loss (its sum, the tokens that count)."""

    def add(self, total: Tensor, found: Mapping[str, Counted]) -> Tensor:
        """As a chunk computed them; total comes back."""
        for row, name in enumerate(self.names):
            if name not in found:
                continue
            losses, weights = found[name]
            self.sums[row, 0] += (losses * weights).sum(dtype=torch.float64)
            self.sums[row, 1] += weights.sum(dtype=torch.float64)
        return total


class RowSums:
    """Of each row of each microbatch the losses of labels that count, summed; stands in for LossSum."""

    share = 1.0

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        """float64 [rows], in the order of microbatches; empty where the last stage isn't."""

    def add(self, total: Tensor, found: Mapping[str, Counted]) -> Tensor:
        losses, weights = found["loss"]
        self.found.append((losses * weights).sum(1, dtype=torch.float64))
        return total
