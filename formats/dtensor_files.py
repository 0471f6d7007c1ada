"""Files of ranks that torch saved DTensors into: verl's FSDP checkpoints.

    model_world_size_8_rank_3.pt        a dictionary by parameter: DTensors, and plain tensors that all ranks have alike
    optim_world_size_8_rank_3.pt        the optimizer's
    huggingface/config.json ...         configuration and tokenizer

A DTensor is a rank's own part, and what it is of the whole: for every axis of the mesh of ranks a placement, Shard(dim) or Replicate().
Shard(dim) over n ranks gives each ceil(size / n) along an axis, the last ones less or nothing; a second one of the same
axis divides what the first one left. Pickles name all this by classes of torch, which are read as inert records.
Source: torch/distributed/tensor of torch 2.4 to 2.13, verl's fsdp_checkpoint_manager.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats import torch_zip
from formats.chunked import Chunk, ChunkedTensor, require_cover
from formats.errors import CorruptCheckpoint, UnsafeContent, UnsupportedInput
from formats.pickle_records import Opaque
from formats.pickle_scan import UNSAFE, scan_file
from formats.tensor import LazyTensor, Shape, as_shape

_FILE = re.compile(r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_MESH_AXES = 8
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_CALLED_FOR_SHARDED = {"builtins.getattr", "torch.distributed.remote_device._remote_device"}


@dataclass(frozen=True)
class _Part:
    """A rank's part of a tensor."""

    offset: Shape
    shape: Shape
    held: LazyTensor

    def tensor(self) -> LazyTensor:
        return self.held


def is_rank_files(path: Path) -> bool:
    return path.is_dir() and any(_FILE.fullmatch(child.name) for child in path.glob("model_world_size_*_rank_*.pt"))


def has_optimizer(path: Path) -> bool:
    return next(path.glob("optim_world_size_*_rank_*.pt"), None) is not None


def read(path: Path) -> tuple[dict[str, LazyTensor], int]:
    """(every tensor by its name, how many ranks saved them).

    Raises CorruptCheckpoint for a rank that is missing and for parts that don't make up a whole, UnsupportedInput for other placements.
    """
    files = _files(path)
    states = [_state(file) for file in files]
    names = states[0].keys()
    for file, state in zip(files, states, strict=True):
        if state.keys() != names:
            other = sorted(names ^ state.keys())[0]
            raise CorruptCheckpoint(f"{file}: {other} isn't in the files of all ranks; are they of one run?")
    return {name: _joined(name, [state[name] for state in states], files) for name in names}, len(files)


def _files(path: Path) -> list[Path]:
    """By rank. Raises CorruptCheckpoint unless there is one of every rank."""
    found: dict[int, dict[int, Path]] = {}
    for child in path.iterdir():
        match = _FILE.fullmatch(child.name)
        if match:
            ranks = found.setdefault(int(match[1]), {})
            if ranks.setdefault(int(match[2]), child) != child:
                raise CorruptCheckpoint(f"{child}: is another file of a rank that has one; keep one of them")
    if len(found) != 1:
        raise CorruptCheckpoint(
            f"{path}: has model_world_size_N_rank_R.pt of runs with {' and '.join(map(str, sorted(found)))} ranks; keep one run's"
        )
    world, files = found.popitem()
    missing = next((rank for rank in range(world) if rank not in files), None)
    if missing is not None or len(files) != world:
        raise CorruptCheckpoint(
            f"{path / f'model_world_size_{world}_rank_{missing}.pt'}: no such file; {len(files)} of {world} ranks are there",
            code="missing-file",
        )
    return [files[rank] for rank in range(world)]


def _state(file: Path) -> Mapping[str, Any]:
    try:
        value = torch_zip.read(file)
    except UnsafeContent as error:
        if not _holds_sharded_tensors(file):
            raise
        raise UnsupportedInput(
            f"{file}: holds ShardedTensors, which FSDP 1 saves in a run without a device mesh, and which are not read; save the model "
            "again with a device mesh (verl: strategy fsdp2), or whole (FSDP's FULL_STATE_DICT)"
        ) from error
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise CorruptCheckpoint(f"{file}: expected a dictionary of tensors, found {type(value).__name__}")
    return value


def _holds_sharded_tensors(file: Path) -> bool:
    """Whether the only calls that no checkpoint needs are those by which ShardedTensors are pickled."""
    names = [each.names for each in scan_file(file)]
    unsafe = {name for found in names for name, judged in found.items() if judged == UNSAFE}
    return unsafe <= _CALLED_FOR_SHARDED and any(_SHARDED_TENSOR in found for found in names)


def _joined(name: str, values: Sequence[Any], files: Sequence[Path]) -> LazyTensor:
    if hasattr(values[0], "read_into"):
        _require_alike(name, values, files)
        return values[0]  # type: ignore[no-any-return]
    whole, parts, dtypes = None, dict[Shape, _Part](), set[str]()
    for value, file in zip(values, files, strict=True):
        what = f"{file}: {name}"
        shape, part = _part(value, what)
        if whole not in (None, shape):
            raise CorruptCheckpoint(f"{what} is a part of {list(shape)}, for other ranks of {list(whole or ())}")
        whole = shape
        dtypes.add(part.held.dtype)
        parts.setdefault(
            part.offset if 0 not in part.shape else (-1, len(parts)), part
        )  # what is replicated counts once
    if whole is None or len(dtypes) > 1:
        raise CorruptCheckpoint(f"{files[0].parent}: {name} is of {' and '.join(sorted(dtypes))} on different ranks")
    filled = [part for part in parts.values() if 0 not in part.shape]
    require_cover(f"{files[0].parent}: {name}", whole, [(part.offset, part.shape) for part in filled])
    return ChunkedTensor(whole, dtypes.pop(), [Chunk.whole(part.offset, part.shape, part) for part in filled])


def _require_alike(name: str, values: Sequence[Any], files: Sequence[Path]) -> None:
    """Raises CorruptCheckpoint unless what the first rank has whole is there on all ranks, of one shape and dtype."""
    first = (values[0].shape, values[0].dtype)
    for value, file in zip(values, files, strict=True):
        if not hasattr(value, "read_into") or (value.shape, value.dtype) != first:
            raise CorruptCheckpoint(f"{file}: {name} is otherwise than in {files[0].name}; are they of one run?")


def _part(value: Any, what: str) -> tuple[Shape, _Part]:
    """(shape of the whole, a rank's part of it) of a DTensor as it was pickled."""
    if not isinstance(value, Opaque) or value.name != "_rebuild_wrapper_subclass":
        kind = f"{value.module}.{value.name}" if isinstance(value, Opaque) else type(value).__name__
        raise UnsupportedInput(f"{what} is neither a tensor nor a DTensor ({kind})")
    try:
        shape, attributes = as_shape(value.args[2]), _attributes(value.state)
        held, spec = attributes["_local_tensor"], _attributes(attributes["_spec"].state)
        mesh, placements = _attributes(spec["mesh"].state), spec["placements"]
        sizes, coordinates = _mesh_sizes(mesh), as_shape(mesh["_coordinate_on_dim"])
        found = tuple(_shard_axis(placement, what) for placement in placements)
        offset, size = _place(shape, found, sizes, coordinates)
        if not hasattr(held, "read_into") or tuple(held.shape) != size:
            raise ValueError(f"its part {list(held.shape)} should be {list(size)}, at {list(offset)} of {list(shape)}")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CorruptCheckpoint(
            f"{what}: is not a DTensor of a known form ({type(error).__name__}: {error!s:.200})"
        ) from error
    return shape, _Part(offset, size, held)


def _attributes(state: Any) -> Mapping[str, Any]:
    """Of an object, whether they lie in its __dict__ or in slots."""
    found: dict[str, Any] = {}
    for each in state if isinstance(state, tuple) else (state,):
        found |= each or {}
    return found


def _mesh_sizes(mesh: Mapping[str, Any]) -> Shape:
    """Ranks along each axis: of the tensor of ranks that a mesh is up to torch 2.8, of its layout in later ones."""
    if "mesh" in mesh:
        return as_shape(tuple(mesh["mesh"].shape))
    return tuple(_mesh_layout(mesh["_layout"]))


def _mesh_layout(layout: Any) -> Iterator[int]:
    state = _attributes(layout.state)
    for axis in state["axes"] if "axes" in state else state["shape"]:
        yield _axis_size(axis)


def _axis_size(axis: Any) -> int:
    if isinstance(axis, Opaque):
        shape = _attributes(axis.state)["shape"]
        axis = shape[0] if isinstance(shape, tuple) and len(shape) == 1 else shape
    if type(axis) is not int or not 0 < axis < 1 << 20:
        raise ValueError(f"a mesh with an axis {axis!r:.60}")
    return axis


def _shard_axis(placement: Any, what: str) -> int | None:
    """The axis that a placement shards; None where all ranks hold the same."""
    if not isinstance(placement, Opaque) or placement.name not in ("Shard", "Replicate"):
        name = getattr(placement, "name", type(placement).__name__)
        raise UnsupportedInput(f"{what}: is placed as {name}; only Shard and Replicate are supported")
    if placement.name == "Replicate":
        return None
    attributes = _attributes(placement.state)
    return as_shape((attributes["dim"] if "dim" in attributes else placement.args[0],))[0]


def _place(shape: Shape, axes: Sequence[int | None], sizes: Shape, coordinates: Shape) -> tuple[Shape, Shape]:
    """(offset, shape) of the part at these coordinates of the mesh."""
    if not len(axes) == len(sizes) == len(coordinates) <= _MESH_AXES:
        raise ValueError(f"{len(axes)} placements on a mesh of {len(sizes)} axes, at {list(coordinates)}")
    offset, size = [0] * len(shape), list(shape)
    for axis, ranks, rank in zip(axes, sizes, coordinates, strict=True):
        if rank >= ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        if axis is not None:
            step = -(-size[axis] // ranks)
            first = min(rank * step, size[axis])
            offset[axis], size[axis] = offset[axis] + first, min(step, size[axis] - first)
    return tuple(offset), tuple(size)
