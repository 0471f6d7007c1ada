"""One rank's part of a DTensor, from the pickle of torch.save.

A DTensor holds a rank's own part, and one placement for every axis of the mesh of ranks: Shard(dim) or Replicate().
Shard(dim) over n ranks gives each rank ceil(size / n) along an axis; the last ranks have less or nothing. A second
Shard of the same axis divides the part that the first one left. Pickles refer to all this by classes of torch, which
are read as inert records. Source: torch/distributed/tensor of torch 2.4 to 2.13.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from formats.errors import CorruptCheckpoint, UnsupportedInput
from formats.pickle_records import Global, Opaque
from formats.tensor import LazyTensor, Shape, as_shape
from formats.wording import brief

_MESH_AXES = 8


@dataclass(frozen=True)
class Part:
    """A rank's part of a tensor."""

    offset: Shape
    shape: Shape
    held: LazyTensor

    def tensor(self) -> LazyTensor:
        return self.held


def part_of(value: Any, what: str) -> tuple[Shape, Part]:
    """(shape of the whole tensor, this rank's part) of a pickled DTensor."""
    if _is_sharded_tensor(value):
        raise UnsupportedInput(
            f"{what} is a ShardedTensor of FSDP 1 without a device mesh, which is not supported; save the model again with a "
            "device mesh (verl: strategy fsdp2), or as a full state dict (FSDP's FULL_STATE_DICT)"
        )
    if not isinstance(value, Opaque) or value.name != "_rebuild_wrapper_subclass":
        kind = f"{value.module}.{value.name}" if isinstance(value, Opaque) else type(value).__name__
        raise UnsupportedInput(f"{what} is neither a tensor nor a DTensor ({kind})")
    try:
        return _rebuilt(value, what)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CorruptCheckpoint(
            f"{what}: is not a DTensor of a known form ({type(error).__name__}: {error!s:.200})"
        ) from error


def _is_sharded_tensor(value: Any) -> bool:
    if not isinstance(value, Opaque):
        return False
    made = value.args[0] if value.args else None
    return isinstance(made, Global) and made.name == "ShardedTensor"


def shard_of(value: Any) -> int:
    """A rank's number among those that shard a DTensor's last mesh axis. value: one that `part_of` has read."""
    mesh = _attributes(_attributes(_attributes(value.state)["_spec"].state)["mesh"].state)
    return as_shape(mesh["_coordinate_on_dim"])[-1]


def _rebuilt(value: Opaque, what: str) -> tuple[Shape, Part]:
    """part_of, with Python's own errors for a value that isn't of the expected form."""
    shape = as_shape(value.args[2])
    attributes = _attributes(value.state)
    held = attributes["_local_tensor"]
    spec = _attributes(attributes["_spec"].state)
    mesh = _attributes(spec["mesh"].state)
    axes = tuple(_shard_axis(placement, what) for placement in spec["placements"])
    mesh_sizes = _mesh_sizes(mesh)
    coordinates = as_shape(mesh["_coordinate_on_dim"])
    offset, size = place(shape, axes, mesh_sizes, coordinates)
    if not hasattr(held, "read_into") or tuple(held.shape) != size:
        raise ValueError(
            f"its part {list(held.shape)} should be {list(size)}, "
            f"at {list(offset)} of {list(shape)}"
        )
    return shape, Part(offset, size, held)


def _attributes(state: Any) -> Mapping[str, Any]:
    """The attributes of an object, from its __dict__ or from its slots. Nothing is copied: objects may share a state."""
    if not isinstance(state, tuple):
        return state or {}
    own, slots = state
    return ChainMap(slots or {}, own or {})


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
        raise ValueError(f"a mesh with an axis {brief(axis)}")
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


def place(
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
