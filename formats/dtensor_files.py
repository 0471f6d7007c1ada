"""Rank files in which torch saved DTensors: verl's FSDP checkpoints.

    model_world_size_8_rank_3.pt        a dictionary by parameter: DTensors, and plain tensors that all ranks share
    optim_world_size_8_rank_3.pt        the optimizer's state
    huggingface/config.json ...         configuration and tokenizer

A DTensor holds a rank's own part, and one placement for every axis of the mesh of ranks: Shard(dim) or Replicate().
Shard(dim) over n ranks gives each rank ceil(size / n) along an axis; the last ranks have less or nothing. A second
Shard of the same axis divides the part that the first one left. Pickles refer to all this by classes of torch, which
are read as inert records. Source: torch/distributed/tensor of torch 2.4 to 2.13, verl's fsdp_checkpoint_manager.py.
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
from formats.tensor import FileTensor, LazyTensor, Shape, as_shape, byte_count

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
    return path.is_dir() and any(
        _FILE.fullmatch(child.name) for child in path.glob("model_world_size_*_rank_*.pt")
    )


def has_optimizer(path: Path) -> bool:
    return next(path.glob("optim_world_size_*_rank_*.pt"), None) is not None


def read(path: Path) -> tuple[dict[str, LazyTensor], int]:
    """(every tensor by its name, number of ranks that saved them).

    Raises CorruptCheckpoint if a rank is missing or if parts don't make up a whole, and UnsupportedInput for other
    placements.
    """
    files = _files(path)
    states = [_state(file) for file in files]
    names = states[0].keys()
    for file, state in zip(files, states, strict=True):
        if state.keys() != names:
            other = sorted(names ^ state.keys())[0]
            raise CorruptCheckpoint(
                f"{file}: {other} isn't in the files of all ranks; are they of one run?"
            )
    found: dict[str, LazyTensor] = {}
    for name in names:
        found[name] = _joined(name, [state[name] for state in states], files)
    return found, len(files)


def _files(path: Path) -> list[Path]:
    """The files in the order of ranks. Raises CorruptCheckpoint unless there is exactly one for every rank."""
    found: dict[int, dict[int, Path]] = {}
    for child in path.iterdir():
        match = _FILE.fullmatch(child.name)
        if match:
            ranks = found.setdefault(int(match[1]), {})
            if ranks.setdefault(int(match[2]), child) != child:
                raise CorruptCheckpoint(
                    f"{child}: is another file of a rank that has one; keep one of them"
                )
    if len(found) != 1:
        sizes = " and ".join(map(str, sorted(found)))
        raise CorruptCheckpoint(
            f"{path}: has model_world_size_N_rank_R.pt of runs with {sizes} ranks; keep one run's"
        )
    world, files = found.popitem()
    missing = next((rank for rank in range(world) if rank not in files), None)
    if missing is not None or len(files) != world:
        file = path / f"model_world_size_{world}_rank_{missing}.pt"
        raise CorruptCheckpoint(
            f"{file}: no such file; {len(files)} of {world} ranks are there",
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
            f"{file}: holds ShardedTensors of FSDP 1 without a device mesh, which are not supported; save the model again with a "
            "device mesh (verl: strategy fsdp2), or as a full state dict (FSDP's FULL_STATE_DICT)"
        ) from error
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise CorruptCheckpoint(
            f"{file}: expected a dictionary of tensors, found {type(value).__name__}"
        )
    return value


def _holds_sharded_tensors(file: Path) -> bool:
    """True if all unsafe calls of a file come from pickled ShardedTensors."""
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
            raise CorruptCheckpoint(
                f"{what} is a part of {list(shape)}, for other ranks of {list(whole or ())}"
            )
        whole = shape
        dtypes.add(part.held.dtype)
        # Parts that are replicated on several ranks count once.
        place = part.offset if 0 not in part.shape else (-1, len(parts))
        replica = parts.setdefault(place, part)
        _require_same_values(replica.held, part.held, what)
    if whole is None or len(dtypes) > 1:
        raise CorruptCheckpoint(
            f"{files[0].parent}: {name} is of {' and '.join(sorted(dtypes))} on different ranks"
        )
    filled = [part for part in parts.values() if 0 not in part.shape]
    require_cover(
        f"{files[0].parent}: {name}", whole, [(part.offset, part.shape) for part in filled]
    )
    return ChunkedTensor(
        whole, dtypes.pop(), [Chunk.whole(part.offset, part.shape, part) for part in filled]
    )


def _require_same_values(first: LazyTensor, other: LazyTensor, what: str) -> None:
    """Raise CorruptCheckpoint if two ranks' copies of one part have different checksums. It reads no values."""
    checksums = _checksum(first), _checksum(other)
    if None not in checksums and checksums[0] != checksums[1]:
        raise CorruptCheckpoint(
            f"{what}: has other values than the copy of another rank; are the files from one run?"
        )


def _checksum(held: LazyTensor) -> int | None:
    """The CRC-32 of a tensor; None if the file doesn't have it for exactly the bytes of this tensor."""
    if not isinstance(held, FileTensor) or held.check is None:
        return None
    entry = held.check.entry
    return entry.crc if entry.size == byte_count(held.shape, held.dtype) else None


def _require_alike(name: str, values: Sequence[Any], files: Sequence[Path]) -> None:
    """Raise CorruptCheckpoint unless all ranks hold this tensor whole, with the same shape, dtype and values."""
    first = (values[0].shape, values[0].dtype)
    for value, file in zip(values, files, strict=True):
        if not hasattr(value, "read_into") or (value.shape, value.dtype) != first:
            raise CorruptCheckpoint(
                f"{file}: {name} differs from {files[0].name}; are the files from one run?"
            )
        _require_same_values(values[0], value, f"{file}: {name}")


def _part(value: Any, what: str) -> tuple[Shape, _Part]:
    """(shape of the whole tensor, this rank's part) of a pickled DTensor."""
    if not isinstance(value, Opaque) or value.name != "_rebuild_wrapper_subclass":
        kind = f"{value.module}.{value.name}" if isinstance(value, Opaque) else type(value).__name__
        raise UnsupportedInput(f"{what} is neither a tensor nor a DTensor ({kind})")
    try:
        return _rebuilt(value, what)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CorruptCheckpoint(
            f"{what}: is not a DTensor of a known form ({type(error).__name__}: {error!s:.200})"
        ) from error


def _rebuilt(value: Opaque, what: str) -> tuple[Shape, _Part]:
    """_part, with Python's own errors for a value that isn't of the expected form."""
    shape = as_shape(value.args[2])
    attributes = _attributes(value.state)
    held = attributes["_local_tensor"]
    spec = _attributes(attributes["_spec"].state)
    mesh = _attributes(spec["mesh"].state)
    axes = tuple(_shard_axis(placement, what) for placement in spec["placements"])
    mesh_sizes = _mesh_sizes(mesh)
    coordinates = as_shape(mesh["_coordinate_on_dim"])
    offset, size = _place(shape, axes, mesh_sizes, coordinates)
    if not hasattr(held, "read_into") or tuple(held.shape) != size:
        raise ValueError(
            f"its part {list(held.shape)} should be {list(size)}, "
            f"at {list(offset)} of {list(shape)}"
        )
    return shape, _Part(offset, size, held)


def _attributes(state: Any) -> Mapping[str, Any]:
    """The attributes of an object, from its __dict__ or from its slots."""
    found: dict[str, Any] = {}
    for each in state if isinstance(state, tuple) else (state,):
        found |= each or {}
    return found


def _mesh_sizes(mesh: Mapping[str, Any]) -> Shape:
    """Number of ranks along each axis of a mesh. Up to torch 2.8 a mesh is a tensor of ranks; later it has a layout."""
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
    """The axis that a placement shards; None if all ranks hold the same."""
    if not isinstance(placement, Opaque) or placement.name not in ("Shard", "Replicate"):
        name = getattr(placement, "name", type(placement).__name__)
        raise UnsupportedInput(
            f"{what}: is placed as {name}; only Shard and Replicate are supported"
        )
    if placement.name == "Replicate":
        return None
    attributes = _attributes(placement.state)
    return as_shape((attributes["dim"] if "dim" in attributes else placement.args[0],))[0]


def _place(
    shape: Shape, axes: Sequence[int | None], sizes: Shape, coordinates: Shape
) -> tuple[Shape, Shape]:
    """(offset, shape) of the part at these coordinates of the mesh."""
    if not len(axes) == len(sizes) == len(coordinates) <= _MESH_AXES:
        raise ValueError(
            f"{len(axes)} placements on a mesh of {len(sizes)} axes, at {list(coordinates)}"
        )
    offset = [0] * len(shape)
    size = list(shape)
    for axis, ranks, rank in zip(axes, sizes, coordinates, strict=True):
        if rank >= ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        if axis is None:
            continue
        whole = size[axis]
        step = -(-whole // ranks)  # rounded up
        first = min(rank * step, whole)
        offset[axis] += first
        size[axis] = min(step, whole - first)
    return tuple(offset), tuple(size)
