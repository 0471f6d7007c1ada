"""Sums partial gradients over ranks, and computes the gradient norm with each parameter counted once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_lite.optimizer.ranges import FlatRange
from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Grid

BLOCK = 1 << 17
"""Elements whose squares are summed in float32. The sums of the blocks are added in float64."""


def sum_shares(ranges: Iterable[FlatRange], grid: Grid) -> None:
    """Sum gradients over tensor ranks or pipeline ends where each rank has only a share. Call it after the DP reduction.

    Ranks that hold the same parameter own the same ranges of it, so each rank sums its own ranges.
    """
    items = list(ranges)
    _sum_together([item.gradient for item in items if item.info.partial], grid.group("tp"))
    for item in items:
        if item.info.tied:
            comm.all_reduce(item.gradient, grid.group(item.info.tied))


def _sum_together(gradients: list[Tensor], group: comm.Group) -> None:
    """Sum many small gradients in a single collective."""
    if group is None or not gradients:
        return
    together = torch.cat(gradients)
    comm.all_reduce(together, group)
    start = 0
    for gradient in gradients:
        gradient.copy_(together[start : start + len(gradient)])
        start += len(gradient)


def squares(ranges: Iterable[FlatRange], grid: Grid, *, distributed: bool) -> Tensor:
    """Return the sum of squares, float64 [], of the gradients that this rank counts. Over all ranks, each counts once."""
    sums = [torch.zeros((), device=grid.device)]
    for item in ranges:
        if not _counts_elsewhere(item, grid, distributed=distributed):
            for part in torch.split(item.gradient, BLOCK):
                sums.append(torch.dot(part, part))
    return torch.stack(sums).double().sum()


def _counts_elsewhere(item: FlatRange, grid: Grid, *, distributed: bool) -> bool:
    """Return True if another rank counts a gradient: tensor rank 0, data-parallel rank 0, or the stage with the first copy."""
    info = item.info
    if info.is_copy:
        return True
    if info.replicated and grid.tp_rank:
        return True
    return not distributed and grid.rank_along(info.reduced_over) > 0


def clip_factor(norm: float, most: float) -> float:
    """Return the factor that limits a gradient norm to `most`; 1 if `most` is 0. Megatron's formula."""
    return min(1.0, most / (norm + 1e-6)) if most else 1.0
