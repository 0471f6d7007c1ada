"""The update of Muon: it equalizes the singular values of the momentum of each matrix.

Source: TensorParallelMuon of megatron/core/optimizer/muon.py, core 0.16.1, and the parts of NVIDIA's
emerging_optimizers that it uses. As there, decay is decoupled and momentum is a mean (m += (1 - beta) (g - m)). Each
canonical matrix of the model (q, k, v, gate, up) is updated separately, even if a rank stores several in one tensor.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from math import sqrt

import torch
from torch import Tensor

from megaconv.model.regions import Region
from megaconv.model.training import MOMENTUM
from megatron_lite.optimizer.algorithm import Rates, TensorGroups
from megatron_lite.optimizer.ranges import FlatRange
from megatron_lite.parallel import comm
from megatron_lite.parallel.parameters import ParameterInfo
from megatron_lite.settings.options import MuonOptions

COEFFICIENTS = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
    ),
}  # fmt: skip
"""a, b, c of each step; the list repeats: X <- a X + (b (X X') + c (X X')^2) X. By Keller Jordan; the names are NVIDIA's."""
SMALLEST_NORM = 1e-7


def orthogonalized(matrix: Tensor, options: MuonOptions) -> Tensor:
    """Return float32 [out, in] with all singular values near 1, by the Newton-Schulz iteration."""
    # With the smaller side first, X X' is small.
    rows, columns = matrix.shape
    transposed = rows > columns
    wide = matrix.t() if transposed else matrix
    norm = torch.linalg.vector_norm(wide).clamp(min=SMALLEST_NORM)
    x = wide / norm
    if options.precision == "medium":
        x = x.bfloat16()
    coefficients = cycle(COEFFICIENTS[options.coefficients])
    for a, b, c in islice(coefficients, options.steps):
        gram = x @ x.t()
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    found: Tensor = x.float()
    return found.t() if transposed else found


def scale(rows: int, columns: int, mode: str) -> float:
    """Return the scale of an update. With spectral and a factor of 0.2, updates are as large as Adam's for any shape."""
    if mode == "spectral":
        return sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns) if mode == "shape_scaling" else rows / columns)


class MuonUpdate:
    """Updates matrices, each of which is one range."""

    def __init__(
        self, ranges: Sequence[FlatRange], options: MuonOptions, groups: TensorGroups
    ) -> None:
        self._ranges, self._options = ranges, options
        self._pieces = [list(pieces(item.info, item.master.device)) for item in ranges]
        self._groups = groups if options.tp_mode == "duplicated" else TensorGroups()
        """The tensor ranks that gather the parts of a matrix; None if each part is updated separately."""

    @torch.no_grad()
    def step(self, rates: Rates, factor: float) -> None:
        """Update the matrices."""
        for item, matrices in zip(self._ranges, self._pieces, strict=True):
            item.gradient.mul_(factor)
            item.master.mul_(1 - rates.lr * rates.decay_of(decays=item.info.decays))
            direction = self._direction(item).view(item.shape)
            master = item.master.view(item.shape)
            for rows, columns in matrices:
                update = self._update_of(direction[rows, columns], item.info)
                master[rows, columns] -= rates.lr * update

    def continue_after(self, steps: int) -> None:
        """Do nothing: the update does not depend on the number of steps."""

    def _direction(self, item: FlatRange) -> Tensor:
        """Add the gradient to the momentum and return the mean that is orthogonalized."""
        momentum, beta = item.tensors[MOMENTUM], self._options.momentum
        momentum.lerp_(item.gradient, 1 - beta)
        if not self._options.nesterov:
            return momentum
        return item.gradient.lerp(momentum, beta)

    def _update_of(self, part: Tensor, info: ParameterInfo) -> Tensor:
        """Return the update of this rank's part of a canonical matrix."""
        group, axis = self._groups.of(info), info.native.tp
        if group is None or axis is None:
            return self._scaled(part)
        whole = _joined(part, axis, group)
        parts: tuple[Tensor, ...] = self._scaled(whole).chunk(group.size(), axis)
        return parts[group.rank()]

    def _scaled(self, matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape
        size = scale(rows, columns, self._options.scale_mode) * self._options.factor
        return orthogonalized(matrix, self._options) * size


def _joined(part: Tensor, axis: int, group: comm.Group) -> Tensor:
    """Join the parts of all tensor ranks along an axis."""
    assert group is not None
    transposed = part.transpose(0, axis).contiguous()
    return comm.gathered(transposed, group).transpose(0, axis)


Rows = slice | Tensor
"""Row numbers: a slice if they are consecutive, else int64 on the device."""


def pieces(info: ParameterInfo, device: torch.device) -> Iterator[tuple[Rows, slice]]:
    """Yield (rows, columns) in this rank's tensor of each canonical matrix in it. Rows are in the matrix's own order.

    It copies row numbers to the device, for which the host waits. Call it before the first step.
    """
    for regions in info.native.parts.values():
        in_order = sorted(regions, key=lambda region: (region.box.row0, region.row))
        rows = [row for region in in_order for row in _rows(region)]
        spans = {(region.col, region.col + region.box.cols) for region in regions}
        ((first, last),) = spans  # all regions of a matrix have the same columns
        yield _consecutive(rows) or torch.tensor(rows, device=device), slice(first, last)


def _rows(region: Region) -> range:
    """Return the rows of a region in the rank's tensor."""
    return range(region.row, region.row + region.box.rows)


def _consecutive(rows: Sequence[int]) -> slice | None:
    """Return the rows as a slice, or None if they are not consecutive."""
    whole = range(rows[0], rows[0] + len(rows))
    return slice(whole.start, whole.stop) if list(whole) == list(rows) else None
