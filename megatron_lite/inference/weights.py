"""Exports a model's weights under transformers' names, one tensor after the other, in any layout.

For example for a server that serves the model during training:

    for name, tensor in hugging_face_tensors(engine):      # on every rank: a collective
        ...
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.tensor import Shape, matrix_shape
from megaconv.families import family
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF
from megaconv.model.natives import NativeTensor, Region, native_tensors
from megaconv.model.table import canonical_shapes
from megatron_lite.engine import Engine
from megatron_lite.parallel import comm
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.parameters import ParameterInfo


def hugging_face_tensors(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor in the model's dtype and on its device), in the order of the layers.

    Collective: all ranks get all tensors. Only one tensor exists at a time, so memory has to suffice for the largest
    one. The weights must not change during the iteration.
    """
    engine.finish()
    config = engine.config
    rows, whole = family(config.family).rows, Layout(stage_layers=(config.layer_count,))
    chunk = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    held = _held(engine)
    shapes = canonical_shapes(rows, config)
    for native in native_tensors(rows, config, HF, whole, 0, chunk, config.vocab):
        if native.copy is None:
            pieces = {
                name: _gathered(engine, shapes[name], held.get(name, [])) for name in native.parts
            }
            yield native.name, _assembled(native, pieces)


@dataclass(frozen=True)
class _Held:
    """A part of a canonical tensor."""

    parameter: Tensor
    regions: tuple[Region, ...]


def _held(engine: Engine) -> dict[str, list[_Held]]:
    """Return the parts of canonical tensors that this rank contributes. Each part has exactly one contributing rank."""
    found: dict[str, list[_Held]] = {}
    for module, infos in zip(engine.chunks, engine.infos, strict=True):
        for info in infos:
            if not _gives(engine, info):
                continue
            native = info.native
            parameter = module.get_parameter(info.name).detach()
            matrix = parameter.view(matrix_shape(native.shape))
            for name, regions in native.parts.items():
                held = _Held(matrix, regions)
                found.setdefault(name, []).append(held)
    return found


def _gives(engine: Engine, info: ParameterInfo) -> bool:
    """Return whether this rank is the first of all ranks that hold the parameter."""
    if info.kind is Kind.EXPERT:
        return engine.grid.rank_along("edp") == 0
    first = engine.grid.tp_rank == 0 or not info.replicated
    return first and engine.grid.rank_along("replicas") == 0 and not info.is_copy


def _gathered(engine: Engine, shape: Shape, held: list[_Held]) -> Tensor:
    """Return a canonical tensor as a matrix. Each rank fills in its parts; others are 0, so the sum of bytes is the whole."""
    matrix = torch.zeros(matrix_shape(shape), dtype=engine.dtype, device=engine.grid.device)
    for part in held:
        for region in part.regions:
            box = region.box
            matrix[box.row0 : box.row1, box.col0 : box.col1] = part.parameter[
                region.row : region.row + box.rows
            ]
    comm.all_reduce(matrix.view(torch.uint8), engine.grid.group("world"))
    return matrix


def _assembled(native: NativeTensor, pieces: dict[str, Tensor]) -> Tensor:
    first = next(iter(pieces.values()))
    matrix = first.new_empty(matrix_shape(native.shape))
    for name, regions in native.parts.items():
        for region in regions:
            box = region.box
            piece = pieces[name][box.row0 : box.row1, box.col0 : box.col1]
            if region.transposed:
                piece = piece.t()
            height, width = piece.shape
            matrix[region.row : region.row + height, region.col : region.col + width] = piece
    return matrix.view(native.shape)
