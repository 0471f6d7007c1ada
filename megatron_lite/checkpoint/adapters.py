"""Adapters are loaded into an engine and gathered from it: whole matrices by name, whatever shards the ranks hold."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.errors import TensorMismatch
from megaconv.model.ir import WEIGHT, Key
from megaconv.model.natives import NativeTensor
from megatron_lite.checkpoint.restore import read_range
from megatron_lite.checkpoint.weights import RandomTensor, fill
from megatron_lite.engine import Engine
from megatron_lite.models.rng import mix

MASTER = "master"


@dataclass(frozen=True)
class HeldTensor:
    """A LazyTensor over a matrix that is already in memory."""

    values: Tensor
    """float32 [rows, cols]."""
    dtype: str = "float32"

    @property
    def shape(self) -> Shape:
        return tuple(self.values.shape)

    def read_into(self, box: Box, out: Bytes) -> None:
        part = self.values[box.row0 : box.row1, box.col0 : box.col1].contiguous()
        out[:] = part.view(torch.uint8).numpy().reshape(out.shape)


def load_adapters(engine: Engine, tensors: Mapping[Key, LazyTensor]) -> None:
    """Fill an engine's adapters, and the optimizer's state where `tensors` holds any. Weights are float32.

    The keys are the names in ParameterInfo.native.parts.
    Raises TensorMismatch for a matrix that is missing, unknown, or of another shape.
    """
    weights = {key.name: tensor for key, tensor in tensors.items() if key.slot == WEIGHT}
    wanted: set[str] = set()
    for module, infos in zip(engine.chunks, engine.adapters, strict=True):
        for info in infos:
            for name, regions in info.native.parts.items():
                _check(
                    name,
                    weights,
                    max(region.box.row1 for region in regions),
                    max(r.box.col1 for r in regions),
                )
            wanted |= info.native.parts.keys()
            fill(module.get_parameter(info.name).detach(), info.native, weights)
    if engine.grid.world == 1 and (left := weights.keys() - wanted):
        raise TensorMismatch(
            f"{min(left)} is the adapter of no matrix that has one here; see --lora-targets"
        )
    if engine.optimizer is None:
        return
    for owned in engine.optimizer.ranges():
        for slot, flat in owned.tensors.items():
            found = {
                name: tensors.get(Key(name, WEIGHT if slot == MASTER else slot))
                for name in owned.info.native.parts
            }
            if any(found.values()):
                flat.copy_(read_range(owned.info.native, slot, found, owned.start, owned.end))
    engine.optimizer.weights_from_masters()


def _check(name: str, tensors: Mapping[str, LazyTensor], rows: int, cols: int) -> None:
    if name not in tensors:
        raise TensorMismatch(f"{name} is missing in the adapter")
    have_rows, have_cols = tensors[name].shape
    if have_rows < rows or have_cols < cols:
        raise TensorMismatch(
            f"{name} has shape {list(tensors[name].shape)}, the model needs {rows} x {cols} or more"
        )


def init_adapters(engine: Engine, seed: int) -> None:
    """Initialize adapters: B is zero, so the model is unchanged at first. A is random, with the variance that peft uses.

    The values are the same for every layout.
    """
    widths: dict[str, int] = {}
    for infos in engine.adapters:
        for info in infos:
            for name, regions in info.native.parts.items():
                widths[name] = max(widths.get(name, 0), *(region.box.col1 for region in regions))
    _agree(engine, widths)
    tensors: dict[Key, LazyTensor] = {}
    for infos in engine.adapters:
        for info in infos:
            for name, regions in info.native.parts.items():
                random = name.endswith("lora_A.weight")
                rows = max(region.box.row1 for region in regions)
                # peft's kaiming_uniform_(a=sqrt(5)) has the variance 1 / (3 · width).
                std = (3 * widths[name]) ** -0.5 if random else 0.0
                tensors[Key(name)] = RandomTensor(
                    (rows, widths[name]), 0.0, std, mix(seed, *name.encode())
                )
    load_adapters(engine, tensors)


def _agree(engine: Engine, widths: dict[str, int]) -> None:
    """Raise each width to its maximum over all ranks. A rank knows only the columns of its own shard. Collective."""
    if engine.grid.world > 1:
        everyones: list[dict[str, int]] = [{} for _ in range(engine.grid.world)]
        dist.all_gather_object(everyones, widths, group=engine.grid.group("world"))
        for name in widths:
            widths[name] = max(others.get(name, 0) for others in everyones)


@dataclass(frozen=True)
class _Piece:
    """A range of elements of one rank's flattened matrix."""

    native: NativeTensor
    slot: str
    start: int
    values: Tensor
    """float32, in main memory."""


def gather_adapters(engine: Engine) -> dict[Key, Tensor]:
    """Return the adapters' float32 master weights and optimizer state as whole matrices on rank 0, {} elsewhere. Collective."""
    assert engine.optimizer is not None
    engine.finish()
    pieces: list[_Piece] = []
    for owned in engine.optimizer.ranges():
        if engine.optimizer.distributed or not engine.grid.rank_along(owned.info.reduced_over):
            for slot, flat in owned.tensors.items():
                name = WEIGHT if slot == MASTER else slot
                pieces.append(_Piece(owned.info.native, name, owned.start, flat.detach().cpu()))
    everyones: list[list[_Piece] | None] = [pieces]
    if engine.grid.world > 1:
        everyones = [None] * engine.grid.world
        rank = dist.get_rank()
        dist.gather_object(
            pieces, everyones if rank == 0 else None, group=engine.grid.group("world")
        )
        if rank:
            return {}
    return _joined([piece for each in everyones if each for piece in each])


def _joined(pieces: list[_Piece]) -> dict[Key, Tensor]:
    shapes: dict[Key, tuple[int, int]] = {}
    for piece in pieces:
        for name, regions in piece.native.parts.items():
            rows, cols = shapes.get(Key(name, piece.slot), (0, 0))
            boxes = [region.box for region in regions]
            shapes[Key(name, piece.slot)] = (
                max(rows, *(b.row1 for b in boxes)),
                max(cols, *(b.col1 for b in boxes)),
            )
    found = {key: torch.zeros(shape) for key, shape in shapes.items()}
    for piece in pieces:
        _, cols = matrix_shape(piece.native.shape)
        elements = torch.arange(torch.Size(piece.native.shape).numel()).view(-1, cols)
        for name, regions in piece.native.parts.items():
            for region in regions:
                places = elements[region.row : region.row + region.box.rows] - piece.start
                here = (places >= 0) & (places < len(piece.values))
                box = region.box
                found[Key(name, piece.slot)][box.row0 : box.row1, box.col0 : box.col1][here] = (
                    piece.values[places[here]]
                )
    return found
