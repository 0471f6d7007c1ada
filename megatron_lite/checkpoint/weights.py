"""Loads weights into a model: each rank reads its own rectangles of canonical tensors from any checkpoint."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from formats.tensor import ITEMSIZE, Box, LazyTensor, matrix_shape
from megaconv.errors import TensorMismatch
from megaconv.families import family
from megaconv.model.ir import shift_of
from megaconv.model.natives import NativeTensor
from megaconv.model.regions import Region
from megaconv.model.spellings.halves import AsHalves
from megaconv.model.table import canonical_shapes
from megatron_lite.checkpoint.initial_weights import initial_weights
from megatron_lite.engine import Engine
from megatron_lite.parallel import comm
from megatron_lite.parallel.parameters import ParameterInfo


def load_weights(engine: Engine, tensors: Mapping[str, LazyTensor]) -> None:
    """Fill all parameters from canonical tensors by name (`megaconv.open(path).tensors`), of any dtype. Collective.

    If several ranks hold a parameter, one of them reads it into its own memory and broadcasts it. The optimizer's
    master weights are set too.
    Raises TensorMismatch for a missing, unknown or misshapen tensor, before any parameter changes.
    """
    check_tensors(engine, tensors)
    first = 0
    for held in engine.portions():
        _fill_portion(engine, held, first, tensors)
        first += len(held)
    if engine.optimizer is not None:
        engine.optimizer.masters_from_weights()


def _fill_portion(
    engine: Engine,
    held: Sequence[tuple[ParameterInfo, Tensor]],
    first: int,
    tensors: Mapping[str, LazyTensor],
) -> None:
    """Fill some parameters. first: the number of the first one among all parameters."""
    for number, (info, parameter) in enumerate(held, first):
        if engine.grid.is_turn(info.reduced_over, number):
            fill(parameter, info.native, tensors)
    # Only now, so that all ranks read in parallel.
    for number, (info, parameter) in enumerate(held, first):
        group = engine.grid.group(info.reduced_over)
        comm.pass_on(parameter, number % comm.size(group), group)


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
    fill_rows(parameter.view(matrix_shape(native.shape)), native, tensors, 0)


def fill_rows(
    out: Tensor, native: NativeTensor, tensors: Mapping[str, LazyTensor], first: int
) -> None:
    """Fill out [rows, columns] with the rows of a parameter from `first` on. Padding rows become 0."""
    last = first + len(out)
    padding = matrix_shape(native.shape)[0] - native.padding_rows
    if last > padding:
        out[max(padding - first, 0) :] = 0
    for name, regions in native.parts.items():
        source = tensors[name]
        for region in regions:
            start, end = max(first, region.row), min(last, region.row + region.box.rows)
            if start >= end:
                continue
            values = read_rows(source, region, start - region.row, end - region.row)
            out[start - first : end - first] = shifted(values, native, source)


def shifted(values: Tensor, native: NativeTensor, source: LazyTensor) -> Tensor:
    """Return values of the source with the number added that this rank's tensor is stored with."""
    added = native.shift - shift_of(source)
    return values.float() + added if added else values


def read_rows(tensor: LazyTensor, region: Region, first: int, last: int) -> Tensor:
    """Return rows first..last of a region, counted from its first row, in the order and dtype of the rank's tensor."""
    if isinstance(region.order, AsHalves):
        # The rows are interleaved in the canonical tensor, and two contiguous halves in the rank's tensor.
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
    """Set random weights, the same for every layout; see initial_weights."""
    load_weights(engine, initial_weights(engine.config, std, seed))
