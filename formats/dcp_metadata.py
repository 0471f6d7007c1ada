"""`.metadata` of PyTorch's distributed checkpoints (DCP): which rectangles of which tensor lie where in which file.

A pickle of torch.distributed.checkpoint.metadata.Metadata, read as inert records and written without torch:

    state_dict_metadata   key -> TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata()
    storage_data          MetadataIndex(fqn, offset, index) -> _StorageInfo(relative_path, offset, length)
    planner_data          key -> where in the nested dictionary it was; None in most Megatron checkpoints
    mcore_data            Megatron core 0.9 to 0.15: the true shapes of tensors that are stored flattened

Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13; MCoreMetadata and saved plans, which
say nothing more, are of Megatron core 0.11 to 0.15.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from formats import pickle_guard
from formats.ceilings import PICKLE_BYTES
from formats.chunked import require_cover
from formats.errors import CorruptCheckpoint, UnsafeContent
from formats.pickle_records import Opaque, TorchDtype
from formats.pickle_writer import dumps
from formats.regular_files import read_small
from formats.tensor import ITEMSIZE, Shape, as_shape

METADATA_NAME = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_FLATTENED = "nd_reformulated_orig_global_shape"


class Range(NamedTuple):
    """Bytes of a file beside `.metadata`."""

    file: str
    offset: int
    nbytes: int


class StoredChunk(NamedTuple):
    """A rectangle of a tensor, and the range that holds it in a torch zip archive of its own."""

    offset: Shape
    shape: Shape
    place: Range


@dataclass(frozen=True)
class StoredTensor:
    shape: Shape
    dtype: str
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class DcpMetadata:
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Range]
    flattened: Mapping[str, Shape] = field(default_factory=dict)
    """True shapes of tensors that Megatron core 0.9 to 0.15 stored flattened, by key."""

    @property
    def files(self) -> list[str]:
        chunks = [chunk.place.file for tensor in self.tensors.values() for chunk in tensor.chunks]
        return sorted({*chunks, *(place.file for place in self.objects.values())})


# Reading.


def read(path: Path) -> DcpMetadata:
    """Raises CorruptCheckpoint for chunks that don't cover their tensor exactly once, UnsafeContent for a path elsewhere."""
    top = pickle_guard.load(read_small(path, PICKLE_BYTES), source=str(path))
    try:
        return _parse(path, _attributes(top))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"({type(error).__name__}: {error})"
        raise CorruptCheckpoint(
            f"{path}: is not the metadata of a distributed checkpoint {what}; save it again"
        ) from error


def _parse(path: Path, state: Mapping[str, Any]) -> DcpMetadata:
    places, files = {}, set[str]()
    for index, info in state["storage_data"].items():
        key = _attributes(index)
        places[key["fqn"], key.get("offset")] = _range(path, key["fqn"], _attributes(info), files)
    tensors, objects = {}, {}
    for name, entry in state["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not the name of a tensor")
        if entry.name == "TensorStorageMetadata":
            tensors[name] = _tensor(path, name, entry.state, places)
        elif (name, None) in places:
            objects[name] = places[name, None]
        else:
            raise CorruptCheckpoint(f"{path}: doesn't say where {name} is stored; save the checkpoint again")
    true_shapes = {name: data.get(_FLATTENED) for name, data in (state.get("mcore_data") or {}).items()}
    return DcpMetadata(tensors, objects, {name: _shape(shape) for name, shape in true_shapes.items() if shape})


def _attributes(value: object) -> Mapping[str, Any]:
    if type(value) is not Opaque or type(value.state) is not dict:
        raise ValueError(f"{value!r:.80} where a record should be")
    return value.state


def _range(path: Path, key: str, info: Mapping[str, Any], files: set[str]) -> Range:
    """files: those that were found to be in the same directory, of which there are few."""
    file, offset, nbytes = info["relative_path"], info["offset"], info["length"]
    if file not in files:
        if not isinstance(file, str) or "/" in file or file in ("", ".", ".."):
            raise UnsafeContent(
                f"{path}: {key} should lie in the file {file!r:.200}, which is not in the same directory"
            )
        files.add(file)
    if info.get("transform_descriptors"):
        how = ", ".join(map(str, info["transform_descriptors"]))
        raise CorruptCheckpoint(f"{path}: {key} is stored through {how:.80}; save the checkpoint without extensions")
    if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0:
        raise ValueError(f"{key} lies at {offset!r:.40}, {nbytes!r:.40} bytes long")
    return Range(file, offset, nbytes)


def _tensor(
    path: Path, name: str, entry: Mapping[str, Any], places: Mapping[tuple[str, Shape | None], Range]
) -> StoredTensor:
    properties = entry["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, TorchDtype) or dtype.name not in ITEMSIZE:
        raise CorruptCheckpoint(f"{path}: {name} is of {dtype!r:.60}, which can't be read")
    shape, chunks = _shape(entry["size"]), []
    for chunk in entry["chunks"]:
        offset, sizes = _shape(chunk.state["offsets"]), _shape(chunk.state["sizes"])
        place = places.get((name, offset))
        if place is None:
            raise CorruptCheckpoint(f"{path}: doesn't say where the chunk of {name} at {list(offset)} is stored")
        chunks.append(StoredChunk(offset, sizes, place))
    require_cover(f"{path}: {name}", shape, [chunk[:2] for chunk in chunks])
    return StoredTensor(shape, dtype.name, tuple(chunks))


def _shape(value: object) -> Shape:
    if type(value) is not tuple:
        raise ValueError(f"{value!r:.80} is not a shape")
    return as_shape(value)


# Writing.


def write(metadata: DcpMetadata, *, nested_keys: bool) -> bytes:
    """The bytes of `.metadata`. nested_keys: say in planner_data, as torch does, that each key is a path of one step."""
    return dumps(_Records().metadata(metadata, nested_keys))[0]


class _Records:
    """What torch would pickle. A shape that occurs again is the same record, so that it is written once."""

    def __init__(self) -> None:
        self._sizes: dict[Shape, Opaque] = {}
        layout = Opaque("torch.serialization", "_get_layout", ("torch.strided",))
        contiguous = Opaque(_METADATA, "_MEM_FORMAT_ENCODING", (0,))
        self._properties = layout, False, contiguous, False

    def metadata(self, metadata: DcpMetadata, nested_keys: bool) -> Opaque:
        tensors = {name: self._tensor(tensor) for name, tensor in metadata.tensors.items()}
        objects = {name: Opaque(_METADATA, "BytesStorageMetadata", (), {}) for name in metadata.objects}
        state = {
            "state_dict_metadata": tensors | objects,
            "planner_data": {name: (name,) for name in (*tensors, *objects)} if nested_keys else None,
            "storage_data": dict(self._storage(metadata)),
            "storage_meta": None,
            "version": "1.0.0",
        }
        return Opaque(_METADATA, "Metadata", (), state)

    def _tensor(self, tensor: StoredTensor) -> Opaque:
        properties = Opaque(_METADATA, "TensorProperties", (), (TorchDtype(tensor.dtype), *self._properties))
        chunks = [self._chunk(chunk) for chunk in tensor.chunks]
        state = {"properties": properties, "size": self._size(tensor.shape), "chunks": chunks}
        return Opaque(_METADATA, "TensorStorageMetadata", (), state)

    def _chunk(self, chunk: StoredChunk) -> Opaque:
        state = {"offsets": self._size(chunk.offset), "sizes": self._size(chunk.shape)}
        return Opaque(_METADATA, "ChunkStorageMetadata", (), state)

    def _storage(self, metadata: DcpMetadata) -> Iterable[tuple[Opaque, Opaque]]:
        for name, tensor in metadata.tensors.items():
            for chunk in tensor.chunks:
                yield _index({"fqn": name, "index": None, "offset": self._size(chunk.offset)}), _info(chunk.place)
        for name, place in metadata.objects.items():
            yield _index({"fqn": name, "index": None}), _info(place)

    def _size(self, shape: Shape) -> Opaque:
        return self._sizes.setdefault(shape, Opaque("torch", "Size", (shape,)))


def _index(state: dict[str, object]) -> Opaque:
    return Opaque(_METADATA, "MetadataIndex", (), state)


def _info(place: Range) -> Opaque:
    state = {"relative_path": place.file, "offset": place.offset, "length": place.nbytes}
    return Opaque("torch.distributed.checkpoint.filesystem", "_StorageInfo", (), state)
