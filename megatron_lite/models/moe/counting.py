"""Numbers of rows of each expert, on the device and on the host."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ReadRows = Callable[[Tensor], list[int]]
"""Copies numbers of rows to the host. This is the only time that a layer waits for the device."""


@dataclass(frozen=True)
class RowNumbers:
    """The way in which a layer gets the number of rows of each expert."""

    read: ReadRows = Tensor.tolist
    capacity: int | None = None
    """The rows of each expert from each rank, padding included. Then nothing is read. None: as many as the router sends."""


def count_rows(chosen: Tensor, experts: int) -> Tensor:
    """Return int64 [experts]: the number of elements of `chosen` (int64, 0 <= element < experts) equal to each expert.

    torch.bincount gives the same numbers, but it waits for the device twice.
    """
    flat = chosen.flatten()
    counts = flat.new_zeros(experts)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))
