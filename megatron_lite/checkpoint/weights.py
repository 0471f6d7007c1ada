"""Loads weights into a model: each rank reads its own rectangles of canonical tensors from any checkpoint."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.errors import TensorMismatch
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.natives import NativeTensor
from megaconv.model.regions import Region
from megaconv.model.spellings.halves import AsHalves
from megaconv.model.table import canonical_shapes
from megatron_lite.engine import Engine
from megatron_lite.models.rng import mix
from megatron_lite.parallel import comm


def load_weights(engine: Engine, tensors: Mapping[str, LazyTensor]) -> None:
    """Fill all parameters from canonical tensors by name (`megaconv.open(path).tensors`), of any dtype. Collective.

    If several ranks hold a parameter, one of them reads it into its own memory and broadcasts it. The optimizer's
    master weights are set too.
    Raises TensorMismatch for a missing, unknown or misshapen tensor, before any parameter changes.
    """
    check_tensors(engine, tensors)
    held = [
        (info, module.get_parameter(info.name).detach())
        for module, infos in zip(engine.chunks, engine.infos, strict=True)
        for info in infos
    ]
    for number, (info, parameter) in enumerate(held):
        if engine.grid.is_turn(info.reduced_over, number):
            fill(parameter, info.native, tensors)
    for number, (info, parameter) in enumerate(
        held
    ):  # only now, so that all ranks read in parallel
        group = engine.grid.group(info.reduced_over)
        comm.pass_on(parameter, number % comm.size(group), group)
    if engine.optimizer is not None:
        engine.optimizer.masters_from_weights()


def check_tensors(engine: Engine, tensors: Mapping[str, LazyTensor]) -> None:
    """Check names and shapes of all tensors. Raises TensorMismatch for a missing, unknown or misshapen tensor."""
    expected = canonical_shapes(family(engine.config.family).rows, engine.config)
    for name, shape in expected.items():
        if name not in tensors:
            raise TensorMismatch(f"{name} is missing; the model needs it with shape {list(shape)}")
        if tuple(tensors[name].shape) != shape:
            raise TensorMismatch(
                f"{name} has shape {list(tensors[name].shape)}, the model needs {list(shape)}"
            )
    for name in tensors:
        if name not in expected:
            raise TensorMismatch(f"{name} is not a tensor of this model")


def fill(parameter: Tensor, native: NativeTensor, tensors: Mapping[str, LazyTensor]) -> None:
    """Fill one parameter from its rectangles. Padding rows become 0."""
    matrix = parameter.view(matrix_shape(native.shape))
    if native.padding_rows:
        matrix[-native.padding_rows :] = 0
    for name, regions in native.parts.items():
        for region in regions:
            rows = region.box.rows
            matrix[region.row : region.row + rows] = read_rows(tensors[name], region, 0, rows)


def read_rows(tensor: LazyTensor, region: Region, first: int, last: int) -> Tensor:
    """Return rows first..last of a region, counted from its first row, in the order and dtype of the rank's tensor."""
    if isinstance(
        region.order, AsHalves
    ):  # interleaved in the canonical tensor, contiguous in the rank's tensor
        whole = read(tensor, region.box)
        return torch.cat((whole[::2], whole[1::2]))[first:last]
    top, _, col0, col1 = region.box
    return read(tensor, Box(top + first, top + last, col0, col1))


def read(tensor: LazyTensor, box: Box) -> Tensor:
    """Return a rectangle as a tensor [rows, cols] of the lazy tensor's dtype."""
    data = np.empty((box.rows, box.cols * ITEMSIZE[tensor.dtype]), np.uint8)
    tensor.read_into(box, data)
    found: Tensor = torch.from_numpy(data).view(getattr(torch, tensor.dtype))
    return found


def init_weights(engine: Engine, std: float, seed: int) -> None:
    """Set random weights, the same for every layout.

    The distribution is N(0, std), and N(0, std / sqrt(2 · layers)) for projections onto the residual stream.
    """
    load_weights(engine, initial_weights(engine.config, std, seed))


def initial_weights(config: ModelConfig, std: float, seed: int) -> dict[str, LazyTensor]:
    """Return the tensors of init_weights by canonical name."""
    shapes = canonical_shapes(family(config.family).rows, config)
    residual = std / math.sqrt(2 * config.layer_count)
    one = 0.0 if config.norm.zero_centered else 1.0
    return {name: _initial(name, shape, std, residual, one, seed) for name, shape in shapes.items()}


def _initial(
    name: str, shape: Shape, std: float, residual: float, one: float, seed: int
) -> LazyTensor:
    """Return the initial value of one tensor. one: the weight of a norm that leaves its input unscaled."""
    if name.endswith("bias"):
        return RandomTensor(shape, mean=0.0, std=0.0, seed=0)
    if "norm" in name:
        return RandomTensor(shape, mean=one, std=0.0, seed=0)
    onto_residual = re.search(r"\.(o|down)\.weight$", name) is not None
    return RandomTensor(
        shape, mean=0.0, std=residual if onto_residual else std, seed=mix(seed, *name.encode())
    )


@dataclass(frozen=True)
class RandomTensor:
    """A lazy tensor of random numbers. Each block of rows has its own seed, so any rectangle can be generated alone."""

    shape: Shape
    mean: float
    std: float
    seed: int
    dtype: str = "float32"
    block: int = 256
    """Rows of one block."""

    def read_into(self, box: Box, out: Bytes) -> None:
        """Write the rectangle's numbers into `out`, float32 bytes."""
        rows, cols = matrix_shape(self.shape)
        found = out.view(np.float32)
        if not self.std:
            found.fill(self.mean)
            return
        # Draw whole blocks, and copy the rows and columns of the box.
        for index in range(box.row0 // self.block, -(-box.row1 // self.block)):
            first, last = index * self.block, min(rows, (index + 1) * self.block)
            generator = torch.Generator().manual_seed(mix(self.seed, index))
            drawn = (
                torch.empty(last - first, cols)
                .normal_(self.mean, self.std, generator=generator)
                .numpy()
            )
            here, end = max(first, box.row0), min(last, box.row1)
            found[here - box.row0 : end - box.row0] = drawn[
                here - first : end - first, box.col0 : box.col1
            ]
