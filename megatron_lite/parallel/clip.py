"""Gradients of all ranks as one: shares summed where a parameter has several, and their norm, each parameter counted once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.zero import FlatRange

BLOCK = 1 << 17
"""Elements whose squares are summed in float32, before the sums of all blocks are in float64."""


def sum_shares(ranges: Iterable[FlatRange], grid: Grid) -> None:
    """After the data-parallel reduction: sum what tensor ranks or the ends of the pipeline have shares of.

    Ranks that hold the same parameter hold the same ranges of it, so each sums its own.
    """
    items = list(ranges)
    _sum_together([item.gradient for item in items if item.info.partial], grid.group("tp"))
    for item in items:
        if item.info.tied:
            comm.all_reduce(item.gradient, grid.group(item.info.tied))


def _sum_together(gradients: list[Tensor], group: comm.Group) -> None:
    """Many small ones in a single collective."""
    if group is None or not gradients:
        return
    together = torch.cat(gradients)
    comm.all_reduce(together, group)
    start = 0
    for gradient in gradients:
        gradient.copy_(together[start : start + len(gradient)])
        start += len(gradient)


def squares(ranges: Iterable[FlatRange], grid: Grid, *, distributed: bool) -> Tensor:
    """Sum of squares, float64 [], of the gradients that this rank counts: over all ranks every parameter counts once."""
    sums = [torch.zeros((), device=grid.device)]
    for item in ranges:
        elsewhere = (
            (item.info.replicated and grid.tp_rank)
            or (not distributed and grid.rank_along(item.info.reduced_over))
            or item.info.is_copy
        )
        if not elsewhere:
            sums += (torch.dot(part, part) for part in torch.split(item.gradient, BLOCK))
    return torch.stack(sums).double().sum()


def clip_factor(norm: float, most: float) -> float:
    """What gradients of this norm are multiplied with; most 0: never less than 1. Megatron's formula."""
    return min(1.0, most / (norm + 1e-6)) if most else 1.0
