"""AWQ's search: factors of a matrix's columns with which INT4 loses the least, on the inputs that the matrix sees.

    s_w = mean over rows of |w| / the largest |w| of its group of 128;  s_x = mean |x|
    scale(alpha) = s_x^alpha / s_w^(1 - alpha), between 1e-4 and 1e4, divided by sqrt(max * min)
    loss(alpha) = sum over batches of mean((x / scale) Q(w * scale)' - x w')^2,  alpha = 0, 0.1 ... 1

The alpha of least loss wins. Each matrix of the Hugging Face model has a search of its own. Source: awq_lite in
model_calib.py of ModelOpt 0.47.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from formats.lazy_numpy import Floats
from megaconv.model.natives import NativeTensor
from megatron_lite.inference.calibration.recording import Matrix, Watcher
from megatron_lite.inference.calibration.statistics import Merged, gathered

ALPHAS = tuple(step / 10 for step in range(11))
GROUP = 128
_LARGEST_CODE, _LEAST_CODE = 7, -8
_LEAST, _MOST = 1e-4, 1e4


@dataclass(frozen=True)
class Rows:
    """A matrix of the Hugging Face model as rows of a matrix of this rank."""

    name: str
    """The module's name."""
    rows: Tensor
    """int64 [out]: the rows, in the order of the Hugging Face matrix."""
    mean: Tensor
    """float32 [in]: the mean of |x|."""


@dataclass
class Search(Watcher):
    """Adds up the losses of all alphas while the model computes."""

    parts: dict[str, list[Rows]]
    """By the name of this rank's matrix."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """float64 [alphas], by the Hugging Face module's name."""

    def see(self, name: str, x: Tensor, weight: Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1])
        for part in self.parts.get(name, ()):
            losses = losses_of(rows, weight.detach()[part.rows], part.mean)
            self.losses[part.name] = self.losses.get(part.name, torch.zeros(())) + losses


def losses_of(x: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
    """x [rows, in], weight [out, in], mean [in] -> float64 [alphas] on the CPU: the loss of each alpha."""
    exact = x @ weight.t()
    of_weight = weight_means(weight)
    found: list[Tensor] = []
    for alpha in ALPHAS:
        scale = scale_at(alpha, mean, of_weight)
        rounded = int4(weight * scale.to(weight.dtype))
        made = (x * (1 / scale).to(x.dtype)) @ rounded.t()
        found.append((made - exact).float().square().mean())
    return torch.stack(found).double().cpu()


def weight_means(weight: Tensor) -> Tensor:
    """weight [out, in] -> float32 [in]: the mean magnitude of each column, relative to the groups of its rows."""
    grouped = weight.abs().reshape(-1, GROUP)
    largest = grouped.amax(1, keepdim=True) + torch.finfo(weight.dtype).tiny
    return (grouped / largest).reshape(weight.shape).mean(0).float()


def scale_at(alpha: float, of_inputs: Tensor, of_weight: Tensor) -> Tensor:
    """The factors of the columns: float32 [in]."""
    divisor = of_weight.pow(1 - alpha) + torch.finfo(torch.float32).tiny
    scale = (of_inputs.pow(alpha) / divisor).clamp(_LEAST, _MOST)
    return scale / (scale.max() * scale.min()).sqrt()


def int4(weight: Tensor) -> Tensor:
    """The weight, rounded to INT4 with a scale for each group of a row."""
    grouped = weight.reshape(-1, GROUP).float()
    scale = grouped.abs().amax(1, keepdim=True) / _LARGEST_CODE
    scale[scale == 0] = 1
    codes = (grouped / scale).round().clamp(_LEAST_CODE, _LARGEST_CODE)
    return (codes * scale).reshape(weight.shape).to(weight.dtype)


def search_of(found: list[Matrix], natives: list[NativeTensor], statistics: Merged) -> Search:
    """The search for all matrices of this rank that consist of whole groups."""
    parts: dict[str, list[Rows]] = {}
    for matrix in found:
        held = matrix.info.native.parts
        device = next(matrix.module.parameters()).device
        for native in natives:
            names = list(native.parts)
            if names[0] not in held or native.shape[1] % GROUP:
                continue
            columns = statistics.columns.get(names[0])
            if columns is None or not columns.rows.min():
                continue
            rows = torch.tensor(list(_rows(native, matrix)), device=device)
            mean = torch.from_numpy(columns.mean).to(device)
            module = native.name.removesuffix(".weight")
            parts.setdefault(matrix.name, []).append(Rows(module, rows, mean))
    return Search(parts)


def _rows(native: NativeTensor, matrix: Matrix) -> Iterator[int]:
    """Yield the rows of this rank's matrix, in the order of the Hugging Face matrix."""
    order: dict[int, int] = {}
    for name, regions in native.parts.items():
        here = {
            region.box.row0 + row: region.row + row
            for region in matrix.info.native.parts[name]
            for row in range(region.box.rows)
        }
        for region in regions:
            for row in range(region.box.rows):
                order[region.row + row] = here[region.box.row0 + row]
    yield from (order[row] for row in range(native.shape[0]))


def scales(search: Search, weights: Mapping[str, Tensor]) -> dict[str, Floats]:
    """The factors of each Hugging Face matrix by module, from the losses of all ranks. Collective.

    weights: this rank's matrices by name.
    """
    losses: dict[str, Tensor] = {}
    for each in gathered(search.losses):
        for name, loss in each.items():
            losses[name] = losses.get(name, torch.zeros(())) + loss
    own: dict[str, Floats] = {}
    for matrix, parts in search.parts.items():
        for part in parts:
            if part.name in losses:
                alpha = ALPHAS[int(losses[part.name].argmin())]
                of_weight = weight_means(weights[matrix].detach()[part.rows])
                own[part.name] = scale_at(alpha, part.mean, of_weight).float().cpu().numpy()
    found: dict[str, Floats] = {}
    for each in gathered(own):
        found |= each
    return {name: np.asarray(scale, np.float32) for name, scale in found.items()}
