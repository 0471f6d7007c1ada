"""Adapters are loaded into an engine and gathered from it: whole matrices by name, whatever shards the ranks hold.

A head of scores that is trained beside adapters belongs to them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.errors import TensorMismatch
from megaconv.model.ir import WEIGHT, Key
from megaconv.model.natives import NativeTensor
from megaconv.model.regions import Region
from megatron_lite.checkpoint.initial_weights import ConstantTensor, RandomTensor, normal
from megatron_lite.checkpoint.restore import read_range
from megatron_lite.checkpoint.weights import fill
from megatron_lite.engine import Engine
from megatron_lite.models.rng import mix
from megatron_lite.optimizer.zero import Optimizer
from megatron_lite.parallel.parameters import ParameterInfo

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
    _load(engine, engine.trained, tensors)


def _load(
    engine: Engine, filled: Sequence[Sequence[ParameterInfo]], tensors: Mapping[Key, LazyTensor]
) -> None:
    """Fill some parameters of each chunk, and the optimizer's state."""
    weights = {key.name: tensor for key, tensor in tensors.items() if key.slot == WEIGHT}
    wanted: set[str] = set()
    for module, infos in zip(engine.chunks, filled, strict=True):
        for info in infos:
            for name, regions in info.native.parts.items():
                rows = max(region.box.row1 for region in regions)
                cols = max(region.box.col1 for region in regions)
                _check(name, weights, rows, cols)
            wanted |= info.native.parts.keys()
            if not engine.shards_parameters:
                # Sharded parameters are filled later, from their masters.
                parameter = module.get_parameter(info.name)
                fill(parameter.detach(), info.native, weights)
    unknown = weights.keys() - wanted
    if engine.grid.world == 1 and unknown:
        raise TensorMismatch(
            f"{min(unknown)} is the adapter of no matrix that has one here; see --lora-targets"
        )
    if engine.optimizer is not None:
        _load_optimizer(engine.optimizer, tensors)


def _load_optimizer(optimizer: Optimizer, tensors: Mapping[Key, LazyTensor]) -> None:
    """Fill the optimizer's state where `tensors` holds any."""
    for owned in optimizer.ranges():
        native = owned.info.native
        for slot, flat in owned.tensors.items():
            key_slot = WEIGHT if slot == MASTER else slot
            found = {name: tensors.get(Key(name, key_slot)) for name in native.parts}
            if any(found.values()):
                values = read_range(native, slot, found, owned.start, owned.end)
                flat.copy_(values)
    optimizer.weights_from_masters()


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

    The values are the same for every layout. A head of scores keeps its own values.
    """
    parts: list[tuple[str, Sequence[Region]]] = []
    for infos in engine.adapters:
        for info in infos:
            parts += info.native.parts.items()
    widths: dict[str, int] = {}
    for name, regions in parts:
        ends = [region.box.col1 for region in regions]
        widths[name] = max(widths.get(name, 0), *ends)
    _agree(engine, widths)
    tensors: dict[Key, LazyTensor] = {}
    for name, regions in parts:
        shape = max(region.box.row1 for region in regions), widths[name]
        if not name.endswith("lora_A.weight"):
            tensors[Key(name)] = ConstantTensor(shape, 0.0)
            continue
        # peft's kaiming_uniform_(a=sqrt(5)) has the variance 1 / (3 · width).
        std = (3 * widths[name]) ** -0.5
        own_seed = mix(seed, *name.encode())
        tensors[Key(name)] = RandomTensor(shape, own_seed, normal(std))
    _load(engine, engine.adapters, tensors)


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
    engine.finish()
    pieces = _own_pieces(engine)
    if engine.grid.world == 1:
        return _joined(pieces)
    everyones: list[list[_Piece] | None] = [None] * engine.grid.world
    is_first = dist.get_rank() == 0
    world = engine.grid.group("world")
    dist.gather_object(pieces, everyones if is_first else None, group=world)
    if not is_first:
        return {}
    gathered: list[_Piece] = []
    for each in everyones:
        gathered += each or []
    return _joined(gathered)


def _own_pieces(engine: Engine) -> list[_Piece]:
    """Return the pieces that no other rank contributes."""
    optimizer = engine.optimizer
    assert optimizer is not None
    pieces: list[_Piece] = []
    for owned in optimizer.ranges():
        info = owned.info
        if not optimizer.distributed and engine.grid.rank_along(info.reduced_over):
            continue  # data-parallel rank 0 has the same tensors
        for slot, flat in owned.tensors.items():
            name = WEIGHT if slot == MASTER else slot
            values = flat.detach().cpu()
            pieces.append(_Piece(info.native, name, owned.start, values))
    return pieces


def _joined(pieces: list[_Piece]) -> dict[Key, Tensor]:
    found = {key: torch.zeros(shape) for key, shape in _shapes(pieces).items()}
    for piece in pieces:
        shape = torch.Size(piece.native.shape)
        _, cols = matrix_shape(shape)
        elements = torch.arange(shape.numel()).view(-1, cols)
        for name, regions in piece.native.parts.items():
            matrix = found[Key(name, piece.slot)]
            for region in regions:
                box = region.box
                end = region.row + box.rows
                places = elements[region.row : end] - piece.start
                here = (places >= 0) & (places < len(piece.values))
                into = matrix[box.row0 : box.row1, box.col0 : box.col1]
                into[here] = piece.values[places[here]]
    return found


def _shapes(pieces: list[_Piece]) -> dict[Key, tuple[int, int]]:
    """Return the shapes of the whole matrices: the ends of their last regions."""
    found: dict[Key, tuple[int, int]] = {}
    for piece in pieces:
        for name, regions in piece.native.parts.items():
            key = Key(name, piece.slot)
            rows, cols = found.get(key, (0, 0))
            for region in regions:
                rows = max(rows, region.box.row1)
                cols = max(cols, region.box.col1)
            found[key] = rows, cols
    return found
