"""Adapters are loaded into an engine and gathered from it: whole matrices by name, whatever shards the ranks hold.

Modules that are trained whole beside adapters belong to them: a head of scores, the embedding, the head.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from formats.tensor import LazyTensor, matrix_shape
from megaconv.errors import TensorMismatch
from megaconv.model.ir import WEIGHT, Key
from megaconv.model.natives import NativeTensor
from megatron_lite.checkpoint.initial_weights import ConstantTensor, RandomTensor, normal
from megatron_lite.checkpoint.magnitudes import magnitudes_of_base
from megatron_lite.checkpoint.restore import read_range
from megatron_lite.checkpoint.token_rows import rows_of_base
from megatron_lite.checkpoint.weights import fill
from megatron_lite.engine import Engine
from megatron_lite.models.rng import mix
from megatron_lite.optimizer.zero import Optimizer
from megatron_lite.parallel import comm
from megatron_lite.parallel.parameters import ParameterInfo

MASTER = "master"


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
    require_fit(engine, list(chain.from_iterable(filled)), weights)
    for module, infos in zip(engine.chunks, filled, strict=True):
        for info in infos:
            missing = info.native.parts.keys() - weights.keys()
            if missing:
                raise TensorMismatch(f"{min(missing)} is missing in the adapter")
            if not engine.shards_parameters:
                # Sharded parameters are filled later, from their masters.
                parameter = module.get_parameter(info.name)
                fill(parameter.detach(), info.native, weights)
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


def require_fit(
    engine: Engine, infos: Sequence[ParameterInfo], weights: Mapping[str, LazyTensor]
) -> None:
    """Raise TensorMismatch for a matrix that is too small for this rank's parameters, or that belongs to none of them."""
    for info in infos:
        for name, regions in info.native.parts.items():
            if name not in weights or not regions:
                continue  # a rank may have nothing but padding of the vocabulary
            rows = max(region.box.row1 for region in regions)
            cols = max(region.box.col1 for region in regions)
            have_rows, have_cols = matrix_shape(tuple(weights[name].shape))
            if have_rows < rows or have_cols < cols:
                raise TensorMismatch(
                    f"{name} has shape {list(weights[name].shape)}, the model needs {rows} x {cols} or more"
                )
    known = set(chain.from_iterable(info.native.parts for info in infos))
    unknown = weights.keys() - known
    # With several ranks, another one may have the parameter.
    if engine.grid.world == 1 and unknown:
        raise TensorMismatch(
            f"{min(unknown)} is the adapter of no matrix that has one here; see --lora-targets"
        )


def init_adapters(
    engine: Engine, seed: int, weights: Mapping[str, LazyTensor] | None = None
) -> None:
    """Initialize adapters: B is zero, so the model is unchanged at first. A is random, with the variance that peft uses.

    The values are the same for every layout. Modules that are trained whole keep their own values.
    Magnitudes and trained rows of single tokens have the values of the base at first, which the engine holds.
    weights: of the base, by canonical name, for these rows.
    """
    of_base = {**rows_of_base(engine, weights or {}), **magnitudes_of_base(engine)}
    shapes = _whole_shapes(engine, engine.adapters)
    tensors: dict[Key, LazyTensor] = {}
    for infos in engine.adapters:
        for name in chain.from_iterable(info.native.parts for info in infos):
            tensors[Key(name)] = of_base.get(name) or _initial(name, shapes[name], seed)
    _load(engine, engine.adapters, tensors)


def _initial(name: str, shape: tuple[int, int], seed: int) -> LazyTensor:
    """Return the initial values of an adapter's matrix."""
    if not name.endswith("lora_A.weight"):
        return ConstantTensor(shape, 0.0)
    # peft's kaiming_uniform_(a=sqrt(5)) has the variance 1 / (3 · width).
    std = (3 * shape[1]) ** -0.5
    own_seed = mix(seed, *name.encode())
    return RandomTensor(shape, own_seed, normal(std))


def _whole_shapes(
    engine: Engine, held: Sequence[Sequence[ParameterInfo]]
) -> dict[str, tuple[int, int]]:
    """Return the shapes of whole matrices, of which each rank knows only its own part. Collective.

    held: parameters of each chunk.
    """
    known = [
        (name, region.box.row1, region.box.col1)
        for info in chain.from_iterable(held)
        for name, regions in info.native.parts.items()
        for region in regions
    ]
    found = _largest(known)
    if engine.grid.world == 1:
        return found
    everyones: list[dict[str, tuple[int, int]]] = [{} for _ in range(engine.grid.world)]
    dist.all_gather_object(everyones, found, group=engine.grid.group("world"))
    return _largest((name, *shape) for each in everyones for name, shape in each.items())


def _largest(ends: Iterable[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    """Return the largest number of rows and of columns for each name."""
    found: dict[str, tuple[int, int]] = {}
    for name, rows, cols in ends:
        most_rows, most_cols = found.get(name, (0, 0))
        found[name] = max(rows, most_rows), max(cols, most_cols)
    return found


def values_of_base(
    engine: Engine, weights: Mapping[str, LazyTensor]
) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters of embedding and head that are trained beside adapters, with the base's values.

    weights: of the base, by canonical name. The engine has whole parameters.
    """
    found = []
    weights = {**weights, **rows_of_base(engine, weights)}
    for module, infos in zip(engine.chunks, engine.trained, strict=True):
        for info in infos:
            if info.native.parts.keys() <= weights.keys():
                parameter = module.get_parameter(info.name)
                values = torch.empty_like(parameter, requires_grad=False)
                fill(values, info.native, weights)
                found.append((parameter, values))
    return found


_AT_ONCE = 4 << 20
"""Elements that a rank sends to rank 0 at a time."""


@dataclass(frozen=True)
class _Piece:
    """A range of elements of one rank's flattened matrix."""

    native: NativeTensor
    slot: str
    start: int
    values: Tensor
    """A view of the masters or the state, in its dtype, or a copy in main memory."""

    def on_cpu(self) -> "_Piece":
        """Return a copy in main memory."""
        return replace(self, values=self.values.cpu().clone())


def gather_adapters(engine: Engine) -> dict[Key, Tensor]:
    """Return the trained float32 master weights and optimizer state as whole matrices on rank 0, {} elsewhere. Collective."""
    engine.finish()
    found: dict[Key, Tensor] = {}
    shapes = _whole_shapes(engine, engine.trained)
    for pieces in _everyones(engine, list(_batches(_own_pieces(engine)))):
        for piece in pieces:
            _place(piece, found, shapes)
    return found


def _own_pieces(engine: Engine) -> Iterator[_Piece]:
    """Yield the pieces that no other rank contributes."""
    optimizer = engine.optimizer
    assert optimizer is not None
    for owned in optimizer.ranges():
        info = owned.info
        if info.is_copy:
            continue  # another stage has the same tensors
        if not optimizer.distributed and engine.grid.rank_along(info.reduced_over):
            continue  # data-parallel rank 0 has the same tensors
        for slot, flat in owned.tensors.items():
            name = WEIGHT if slot == MASTER else slot
            for first in range(0, len(flat), _AT_ONCE):
                part = flat.detach()[first : first + _AT_ONCE]
                yield _Piece(info.native, name, owned.start + first, part)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Yield consecutive pieces that have at most _AT_ONCE elements together."""
    batch: list[_Piece] = []
    room = _AT_ONCE
    for piece in pieces:
        if batch and len(piece.values) > room:
            yield batch
            batch, room = [], _AT_ONCE
        batch.append(piece)
        room -= len(piece.values)
    if batch:
        yield batch


def _everyones(engine: Engine, own: Sequence[list[_Piece]]) -> Iterator[list[_Piece]]:
    """Yield the pieces of all ranks on rank 0, a batch of each rank at a time; nothing elsewhere. Collective."""
    if engine.grid.world == 1:
        yield from own
        return
    world, is_first = engine.grid.group("world"), dist.get_rank() == 0
    count = torch.tensor(float(len(own)), device=engine.grid.device)
    comm.largest(count, world)
    for turn in range(int(count)):
        mine = [piece.on_cpu() for piece in own[turn]] if turn < len(own) else []
        everyones: list[list[_Piece] | None] = [None] * engine.grid.world
        dist.gather_object(mine, everyones if is_first else None, group=world)
        yield from (each for each in everyones if each)


def _place(piece: _Piece, found: dict[Key, Tensor], shapes: Mapping[str, tuple[int, int]]) -> None:
    """Put a piece at its places in the whole matrices, which it makes where they are missing."""
    _, cols = matrix_shape(tuple(piece.native.shape))
    for name, regions in piece.native.parts.items():
        key = Key(name, piece.slot)
        if key not in found:
            found[key] = torch.zeros(shapes[name][: len(piece.native.shape)])
        whole = found[key].view(shapes[name])  # a vector has one column
        for region in regions:
            box = region.box
            into = whole[box.row0 : box.row1, box.col0 : box.col1]
            start, end = region.row * cols, (region.row + box.rows) * cols
            first = max(start, piece.start)
            last = min(end, piece.start + len(piece.values))
            if first < last:
                values = piece.values[first - piece.start : last - piece.start]
                _fill_in_order(into, first - start, values)


def _fill_in_order(matrix: Tensor, first: int, values: Tensor) -> None:
    """Fill the elements of a matrix from the `first` one on, row by row."""
    cols = matrix.shape[1]
    while len(values):
        row, col = divmod(first, cols)
        if col or len(values) < cols:
            count = min(cols - col, len(values))
            matrix[row, col : col + count] = values[:count]
        else:
            rows = len(values) // cols
            count = rows * cols
            matrix[row : row + rows] = values[:count].view(rows, cols)
        first, values = first + count, values[count:]
