"""`.metadata` of PyTorch's distributed checkpoints (DCP): the file and place of every rectangle of every tensor.

It is a pickle of torch.distributed.checkpoint.metadata.Metadata. megaconv reads it as inert records and writes it
without torch:

    state_dict_metadata   key -> TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata()
    storage_data          MetadataIndex(fqn, offset, index) -> _StorageInfo(relative_path, offset, length)
    planner_data          key -> its place in the nested dictionary; None in most Megatron checkpoints
    mcore_data            Megatron core 0.9 to 0.15: the true shapes of tensors that are stored flattened

Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13. MCoreMetadata is from Megatron core
0.11 to 0.15, and so are saved plans, which add no information.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from formats import pickle_guard
from formats.ceilings import PICKLE_BYTES
from formats.chunked import require_cover
from formats.errors import CorruptCheckpoint, UnsafeContent
from formats.pickle_records import Opaque, TorchDtype
from formats.pickle_writer import PickleWriter
from formats.regular_files import read_small
from formats.tensor import ITEMSIZE, Shape, as_shape
from formats.wording import brief

METADATA_NAME = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_FLATTENED = "nd_reformulated_orig_global_shape"


class Range(NamedTuple):
    """A range of bytes in a file next to `.metadata`."""

    file: str
    offset: int
    nbytes: int


class StoredChunk(NamedTuple):
    """A rectangle of a tensor, and the range that holds it in its own torch zip archive."""

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
    """Key -> true shape of each tensor that Megatron core 0.9 to 0.15 stored flattened."""

    @property
    def files(self) -> list[str]:
        chunks = [chunk.place.file for tensor in self.tensors.values() for chunk in tensor.chunks]
        return sorted({*chunks, *(place.file for place in self.objects.values())})


# Reading.


def read(path: Path) -> DcpMetadata:
    """Read a `.metadata` file.

    Raises CorruptCheckpoint if chunks don't cover their tensor exactly once, and UnsafeContent for a path outside the
    directory.
    """
    top = pickle_guard.load(_content(path), source=str(path))
    try:
        return _parse(path, _attributes(top))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"({type(error).__name__}: {error})"
        raise CorruptCheckpoint(
            f"{path}: is not the metadata of a distributed checkpoint {what}; save it again"
        ) from error


def _content(path: Path) -> bytes:
    try:
        return read_small(path, PICKLE_BYTES)
    except CorruptCheckpoint as error:
        if error.code != "missing-file":
            raise
        hint = "it lists all tensors. `cp *` leaves out names that begin with a dot: copy it too"
        raise CorruptCheckpoint(f"{error}; {hint}", code=error.code) from None


def _parse(path: Path, state: Mapping[str, Any]) -> DcpMetadata:
    places, files = {}, set[str]()
    for index, info in state["storage_data"].items():
        key = _attributes(index)
        name, offset = key["fqn"], key.get("offset")
        if type(name) is not str:
            raise ValueError(f"{brief(name)} is not the name of a tensor")
        place = _range(path, name, _attributes(info), files)
        places[_index(name, offset if offset is None else _shape(offset))] = place
    tensors, objects = {}, {}
    for name, entry in state["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not the name of a tensor")
        if entry.name == "TensorStorageMetadata":
            tensors[name] = _tensor(path, name, entry.state, places)
        elif (index := _index(name, None)) in places:
            objects[name] = places[index]
        else:
            raise CorruptCheckpoint(f"{path}: has no file for {name}; save the checkpoint again")
    true_shapes = {
        name: data.get(_FLATTENED) for name, data in (state.get("mcore_data") or {}).items()
    }
    return DcpMetadata(
        tensors, objects, {name: _shape(shape) for name, shape in true_shapes.items() if shape}
    )


def _attributes(value: object) -> Mapping[str, Any]:
    if type(value) is not Opaque or type(value.state) is not dict:
        raise ValueError(f"{brief(value)} where a record should be")
    return value.state


def _index(name: str, offset: Shape | None) -> tuple[str, str]:
    """The key of a chunk or an object. Offsets are texts here, because a file can choose many tuples that have one hash."""
    return name, repr(offset)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_natural(value: object) -> bool:
    return type(value) is int and value >= 0


def _range(path: Path, key: str, info: Mapping[str, Any], files: set[str]) -> Range:
    """The byte range of a storage record. files: names already checked to be in the same directory; this function adds
    to them."""
    file, offset, nbytes = info["relative_path"], info["offset"], info["length"]
    if type(file) is not str or file not in files:
        if not _is_text(file) or "/" in file or file in ("", ".", ".."):
            raise UnsafeContent(
                f"{path}: {key} should lie in the file {brief(file, 200)}, which is not in the same directory"
            )
        files.add(file)
    if info.get("transform_descriptors"):
        how = ", ".join(filter(_is_text, info["transform_descriptors"]))
        raise CorruptCheckpoint(
            f"{path}: {key} is stored through {how:.80}; save the checkpoint without extensions"
        )
    if not (_is_natural(offset) and _is_natural(nbytes)):
        raise ValueError(f"{key} lies at {brief(offset, 40)}, {brief(nbytes, 40)} bytes long")
    return Range(file, offset, nbytes)


def _tensor(
    path: Path,
    name: str,
    entry: Mapping[str, Any],
    places: Mapping[tuple[str, str], Range],
) -> StoredTensor:
    properties = entry["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, TorchDtype) or dtype.name not in ITEMSIZE:
        raise CorruptCheckpoint(f"{path}: {name} is of {brief(dtype)}, which can't be read")
    shape = _shape(entry["size"])
    chunks = []
    for chunk in entry["chunks"]:
        offset = _shape(chunk.state["offsets"])
        sizes = _shape(chunk.state["sizes"])
        place = places.get(_index(name, offset))
        if place is None:
            raise CorruptCheckpoint(
                f"{path}: has no file for the chunk of {name} at {list(offset)}; "
                "save the checkpoint again"
            )
        chunks.append(StoredChunk(offset, sizes, place))
    require_cover(f"{path}: {name}", shape, [chunk[:2] for chunk in chunks])
    return StoredTensor(shape, dtype.name, tuple(chunks))


def _shape(value: object) -> Shape:
    if type(value) is not tuple:
        raise ValueError(f"{brief(value)} is not a shape")
    return as_shape(value)


# Writing.


def write(metadata: DcpMetadata, *, nested_keys: bool, containers: Collection[str] = ()) -> bytes:
    """The bytes of `.metadata`. nested_keys: write planner_data as torch does, with each key as a path of one step.

    containers: words that begin a path of two steps: `optimizer` for optimizer.state.norm.weight.step, which is
    `state.norm.weight.step` in the dictionary `optimizer`.

    Large models have hundreds of thousands of chunks, each with three records. The opcodes are written one after
    another, without a Python object for each record.
    """
    records = _Records()
    names = (*metadata.tensors, *metadata.objects)
    paths = {name: _path(name, containers) for name in names} if nested_keys else None
    records.metadata(metadata, paths)
    return records.writer.finish()


def _path(name: str, containers: Collection[str]) -> tuple[str, ...]:
    container, _, inner = name.partition(".")
    return (container, inner) if container in containers and inner else (name,)


class _Records:
    """Writes the records that torch would pickle. Each record is made without arguments, and gets a dictionary as its
    state.

    A repeated shape is the same record, and is written once.
    """

    def __init__(self) -> None:
        self.writer = PickleWriter()
        self._openings: dict[str, bytes] = {}
        self._names: dict[str, bytes] = {}
        layout = Opaque("torch.serialization", "_get_layout", ("torch.strided",))
        contiguous = Opaque(_METADATA, "_MEM_FORMAT_ENCODING", (0,))
        self._properties = layout, False, contiguous, False

    def metadata(self, metadata: DcpMetadata, paths: Mapping[str, tuple[str, ...]] | None) -> None:
        """Write everything, as one record. paths: key -> its place in the nested dictionary."""
        names = (*metadata.tensors, *metadata.objects)
        self._open(_METADATA, "Metadata", "state_dict_metadata")
        self._begin_dict(names)
        for name, tensor in metadata.tensors.items():
            self.writer.text(name)
            self._tensor(tensor)
        nothing = Opaque(_METADATA, "BytesStorageMetadata", (), {})
        for name in metadata.objects:
            self.writer.text(name)
            self.writer.write(nothing)
        self._end_dict(names)
        self._field("planner_data")
        self.writer.write(paths)
        self._field("storage_data")
        self._begin_dict(names)
        self._storage(metadata)
        self._end_dict(names)
        self._field("storage_meta")
        self.writer.write(None)
        self._field("version")
        self.writer.write("1.0.0")
        self._close()

    def _tensor(self, tensor: StoredTensor) -> None:
        properties = Opaque(
            _METADATA, "TensorProperties", (), (TorchDtype(tensor.dtype), *self._properties)
        )
        self._open(_METADATA, "TensorStorageMetadata", "properties")
        self.writer.write(properties)
        self._field("size")
        self._size(tensor.shape)
        self._field("chunks")
        self.writer.out += b"]("
        for chunk in tensor.chunks:
            self._open(_METADATA, "ChunkStorageMetadata", "offsets")
            self._size(chunk.offset)
            self._field("sizes")
            self._size(chunk.shape)
            self._close()
        self.writer.out += b"e"
        self._close()

    def _storage(self, metadata: DcpMetadata) -> None:
        """Write the place of each chunk and each object, by its index."""
        for name, tensor in metadata.tensors.items():
            for chunk in tensor.chunks:
                self._index(name)
                self._field("offset")
                self._size(chunk.offset)
                self._close()
                self._info(chunk.place)
        for name, place in metadata.objects.items():
            self._index(name)
            self._close()
            self._info(place)

    def _index(self, name: str) -> None:
        self._open(_METADATA, "MetadataIndex", "fqn")
        self.writer.text(name)
        self._field("index")
        self.writer.write(None)

    def _info(self, place: Range) -> None:
        self._open("torch.distributed.checkpoint.filesystem", "_StorageInfo", "relative_path")
        self.writer.text(place.file)
        self._field("offset")
        self.writer.integer(place.offset)
        self._field("length")
        self.writer.integer(place.nbytes)
        self._close()

    def _size(self, shape: Shape) -> None:
        """Write a torch.Size."""
        writer = self.writer
        if not writer.fetch(shape):
            writer.name("torch", "Size")
            writer.sequence((shape,))
            writer.out += b"R"
            writer.remember(shape)

    def _open(self, module: str, name: str, field: str) -> None:
        """Begin a record, up to the value of its first field."""
        opening = self._openings.get(name)
        if opening is not None:
            self.writer.out += opening
            return
        self.writer.name(module, name)
        self.writer.out += b")\x81}("
        self.writer.text(field)
        # From here on, both are fetched from the memo.
        called = self.writer.reference(f"c{module}\n{name}\n".encode())
        self._openings[name] = called + b")\x81}(" + self.writer.reference(field)

    def _field(self, name: str) -> None:
        """Write the name of a record's next field."""
        known = self._names.get(name)
        if known is not None:
            self.writer.out += known
            return
        self.writer.text(name)
        self._names[name] = self.writer.reference(name)

    def _close(self) -> None:
        self.writer.out += b"ub"

    def _begin_dict(self, names: tuple[str, ...]) -> None:
        self.writer.out += b"}(" if names else b"}"

    def _end_dict(self, names: tuple[str, ...]) -> None:
        self.writer.out += b"u" if names else b""
