"""Sums partial gradients over ranks, and computes the gradient norm with each parameter counted once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_lite.optimizer.ranges import FlatRange
from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Grid

BLOCK = 1 << 17
"""Elements whose squares a CPU sums in float32. The sums of the blocks are added in float64."""


def sum_shares(ranges: Iterable[FlatRange], grid: Grid) -> None:
    """Sum gradients over tensor ranks or pipeline ends where each rank has only a share. Call it after the DP reduction.

    Ranks that hold the same parameter own the same ranges of it, so each rank sums its own ranges.
    """
    items = list(ranges)
    partial = [item.gradient for item in items if item.info.partial]
    for dtype in (torch.float32, torch.bfloat16):
        _sum_together([each for each in partial if each.dtype == dtype], grid.group("tp"))
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
    counted = [
        item.gradient
        for item in ranges
        if not _counts_elsewhere(item, grid, distributed=distributed)
    ]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=grid.device)
    return (_of_gpu if grid.device.type == "cuda" else _of_cpu)(counted)


def _of_cpu(gradients: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares by one product for each block."""
    dots = (
        torch.dot(part, part)
        for gradient in gradients
        for part in map(Tensor.float, torch.split(gradient, BLOCK))
    )
    return torch.stack(list(dots)).double().sum()


def _of_gpu(gradients: list[Tensor]) -> Tensor:
    """Return the sum of squares by a few launches for all gradients. The kernel adds in a fixed order."""
    norms = torch._foreach_norm(gradients, 2, torch.float32)
    return torch.stack(list(norms)).double().square().sum()


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
