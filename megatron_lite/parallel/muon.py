"""Muon: momentum whose singular values are made alike, for the matrices of layers; everything else is Adam's.

Source: TensorParallelMuon of megatron/core/optimizer/muon.py, core 0.16.1, and what it takes of NVIDIA's emerging_optimizers. As there
decay is decoupled and momentum is a mean (m += (1 - beta) (g - m)). Each matrix that the model's description has by itself (q, k, v,
gate, up) is taken by itself, however a rank stores it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import sqrt

import torch
from torch import Tensor

from megatron_lite.parallel import comm
from megatron_lite.parallel.kinds import Kind
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.settings.options import MuonOptions

COEFFICIENTS = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
    ),
}  # fmt: skip
"""a, b, c of each step in turn, over and over: X <- a X + (b (X X') + c (X X')^2) X. By Keller Jordan; the names are NVIDIA's."""
SMALLEST_NORM = 1e-7


def takes(info: ParameterInfo) -> bool:
    """Whether Muon has this parameter: a matrix of a layer. Router, gate of a shared expert, tables and head are Adam's."""
    return info.kind in (Kind.SHARDED, Kind.EXPERT) and len(info.native.shape) == 2


def orthogonalized(matrix: Tensor, options: MuonOptions) -> Tensor:
    """float32 [out, in], all of whose singular values are near 1: by Newton and Schulz's iteration."""
    wide = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / torch.linalg.vector_norm(wide).clamp(min=SMALLEST_NORM)
    if options.precision == "medium":
        x = x.bfloat16()
    for a, b, c in islice(cycle(COEFFICIENTS[options.coefficients]), options.steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    found: Tensor = x.float()
    return found if wide is matrix else found.t()


def scale(rows: int, columns: int, mode: str) -> float:
    """spectral: as large as Adam's updates but for a factor of 0.2, whatever the shape."""
    if mode == "spectral":
        return sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns) if mode == "shape_scaling" else rows / columns)


@dataclass(frozen=True)
class Matrix:
    """A parameter of this rank and what it is updated with; all of this shape or flat, float32."""

    info: ParameterInfo
    master: Tensor
    gradient: Tensor
    momentum: Tensor
    group: comm.Group
    """The tensor ranks that hold the other parts; None where there are none, or each part is taken alone."""


class Muon:
    """Updates matrices."""

    def __init__(self, matrices: Sequence[Matrix], options: MuonOptions) -> None:
        self.matrices, self.options = matrices, options

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, factor: float = 1.0) -> None:
        """By gradients times factor."""
        options = self.options
        for matrix in self.matrices:
            matrix.gradient.mul_(factor)
            matrix.master.mul_(1 - lr * weight_decay)
            matrix.momentum.lerp_(matrix.gradient, 1 - options.momentum)
            moved = matrix.gradient.lerp(matrix.momentum, options.momentum) if options.nesterov else matrix.momentum
            whole, master = moved.view(matrix.info.native.shape), matrix.master.view(matrix.info.native.shape)
            for rows, columns in pieces(matrix.info):
                update = self._of_piece(whole[rows, columns], matrix)
                master[rows, columns] -= lr * update

    def _of_piece(self, part: Tensor, matrix: Matrix) -> Tensor:
        axis, options = matrix.info.native.tp, self.options
        together = matrix.group is not None and axis is not None
        whole = _joined(part, axis or 0, matrix.group) if together else part
        rows, columns = whole.shape
        made: Tensor = orthogonalized(whole, options) * (scale(rows, columns, options.scale_mode) * options.factor)
        if not together or matrix.group is None:
            return made
        parts: tuple[Tensor, ...] = made.chunk(matrix.group.size(), axis or 0)
        return parts[matrix.group.rank()]


def _joined(part: Tensor, axis: int, group: comm.Group) -> Tensor:
    """All tensor ranks' parts along an axis."""
    assert group is not None
    turned = part.transpose(0, axis).contiguous()
    return comm.gathered(turned, group).transpose(0, axis)


def pieces(info: ParameterInfo) -> Iterator[tuple[Tensor, slice]]:
    """(rows, columns) in this rank's tensor of each canonical matrix that it is made of, in the order of its own rows."""
    for regions in info.native.parts.values():
        runs = sorted((region.box.row0, region.row, region.box.rows) for region in regions)
        rows = torch.cat([torch.arange(row, row + count) for _, row, count in runs])
        (columns,) = {(region.col, region.box.cols) for region in regions}
        yield rows, slice(columns[0], columns[0] + columns[1])
