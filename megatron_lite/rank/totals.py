"""Sums of a step over all ranks: losses, the square of the gradient norm, signals."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Grid
from megatron_lite.rank.loss_sums import LossSum


class Totals(NamedTuple):
    """Sums of a step over all ranks."""

    losses: list[tuple[float, float]]
    """The sum of each loss, and the number of tokens or pairs that count."""
    square: float
    """The sum of squares of all gradients."""
    signals: list[float]

    def means_of_others(self, names: Sequence[str]) -> dict[str, float]:
        """Return the means of all losses except the first, by name, as far as they count anything. names: of all losses."""
        others = zip(names[1:], self.losses[1:], strict=True)
        return {name: total / count for name, (total, count) in others if count}


def sum_over_world(losses: LossSum, square: Tensor, signals: Sequence[float], grid: Grid) -> Totals:
    """Return the sums over all ranks. square: the sum of squares of the gradients that this rank counts.

    This is the one collective over all ranks in a step, and the only time that the step waits for the GPU.
    """
    # Other tensor ranks of the last stage have the same losses.
    is_first = grid.tp_rank == 0
    own_losses = losses.sums.flatten() * float(is_first)
    own_square = square.to(torch.float64).view(1)
    own_signals = _on_device(signals, grid.device)
    values = torch.cat([own_losses, own_square, own_signals])
    comm.all_reduce(values, grid.group("world"))
    found = values.tolist()
    end = len(own_losses)
    sums = found[0:end:2]
    counts = found[1:end:2]
    pairs = list(zip(sums, counts, strict=True))
    return Totals(pairs, square=found[end], signals=found[end + 1 :])


def _on_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Return float64 [numbers] without waiting for the device."""
    values = [float(number) for number in numbers]
    pinned = device.type == "cuda"
    own = torch.tensor(values, dtype=torch.float64, pin_memory=pinned)
    return own.to(device, non_blocking=True)
