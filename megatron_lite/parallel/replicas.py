"""Checks that data-parallel ranks hold equal weights, by a checksum of every parameter."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.parallel import comm
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.parameters import ParameterInfo

BLOCK = 1 << 22
"""Elements per part of the checksum."""
_FACTOR = 0x9E3779B97F4A7C1


class Differs(NamedTuple):
    """A parameter that differs from the first rank's on some ranks."""

    name: str
    chunk: int
    ranks: tuple[int, ...]
    """Indices in the data-parallel group of the ranks that differ."""


def differing(parameters: Iterable[tuple[ParameterInfo, Tensor]], grid: Grid) -> list[Differs]:
    """Return this rank's parameters that differ; the same on all ranks of a group. Collective."""
    found = []
    by_axis: dict[str, list[tuple[ParameterInfo, Tensor]]] = {}
    for info, tensor in parameters:
        by_axis.setdefault(info.reduced_over, []).append((info, tensor))
    for axis in sorted(by_axis):
        group, theirs = grid.group(axis), by_axis[axis]
        if group is None:
            continue
        sums = torch.stack([checksum(tensor) for _, tensor in theirs])
        everywhere = comm.gathered(sums, group).view(comm.size(group), -1)
        unequal = (everywhere != everywhere[0]).tolist()
        for number, (info, _) in enumerate(theirs):
            ranks = tuple(rank for rank, row in enumerate(unequal) if row[number])
            if ranks:
                found.append(Differs(info.name, info.chunk, ranks))
    return found


def checksum(tensor: Tensor) -> Tensor:
    """Return int64 []: a checksum of the bits and their positions."""
    bits = tensor.detach().reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), BLOCK):
        part = bits[start : start + BLOCK].long()
        places = torch.arange(start, start + len(part), device=tensor.device)
        # Odd factors are invertible modulo 2^64, so a change of one element always changes the sum.
        total += ((part + 1) * (places * 2 + 1) * _FACTOR).sum()
    return total
