"""Sums of a step's or an evaluation's losses on the last stage."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_lite.models.network_interface import Counted


class LossSum:
    """Sums the losses of a step on the last stage; the sums stay on the device until the end of the step."""

    def __init__(self, names: Sequence[str], device: torch.device, share: float) -> None:
        """share: see Pass.share."""
        self.names, self.share = names, share
        self.sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
        """For each loss (its sum, the number of tokens that count)."""

    def add(self, total: Tensor, found: Mapping[str, Counted]) -> Tensor:
        """Add the losses of a chunk. Returns total unchanged."""
        for row, name in enumerate(self.names):
            if name not in found:
                continue
            losses, weights = found[name]
            self.sums[row, 0] += (losses * weights).sum(dtype=torch.float64)
            self.sums[row, 1] += weights.sum(dtype=torch.float64)
        return total


class RowSums:
    """Sums the losses of labels that count for each row of each microbatch; has LossSum's interface."""

    share = 1.0

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        """float64 [rows], in the order of microbatches; empty except on the last stage."""

    def add(self, total: Tensor, found: Mapping[str, Counted]) -> Tensor:
        losses, weights = found["loss"]
        self.found.append((losses * weights).sum(1, dtype=torch.float64))
        return total


class LabelLosses:
    """Keeps the loss of each label of each microbatch; has LossSum's interface."""

    share = 1.0

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        """float32 [rows, sequence], in the order of microbatches; empty except on the last stage."""

    def add(self, total: Tensor, found: Mapping[str, Counted]) -> Tensor:
        self.found.append(found["loss"].losses)
        return total
