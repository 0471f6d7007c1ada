"""Directories of torch's distributed checkpoints: `.metadata`, and files in which torch zip archives follow each other.

    <directory>/.metadata                the place of each chunk of each tensor
    <directory>/__0_0.distcp ...         one torch file (a zip archive) per chunk and per object, back to back
    <directory>/common.pt                Megatron core up to 0.18: everything that isn't sharded
    <directory>/metadata.json            Megatron core: the name of the format

torch can also write each file as one safetensors file (SerializationFormat.SAFETENSORS), whose tensors are found by
their keys. Megatron wraps objects in a list of one. Source: torch/distributed/checkpoint/filesystem.py of torch 2.13,
megatron/core/dist_checkpointing of Megatron core 0.9 to 0.19.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from formats import dcp_metadata, safetensors, torch_zip
from formats.ceilings import CONFIG_BYTES
from formats.chunked import Chunk, ChunkedTensor
from formats.dcp_metadata import METADATA_NAME, DcpMetadata, Range, StoredTensor
from formats.errors import CheckpointError, CorruptCheckpoint
from formats.regular_files import read_json
from formats.tensor import FileTensor, InputFile, LazyTensor, Shape, StridedTensor, byte_count

FORMAT_FILE = "metadata.json"
COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""Replaces common.pt from core 0.19 on."""


@dataclass(frozen=True)
class DistDirectory:
    """An opened directory. Metadata and small files have been read, but no tensor and no object."""

    path: Path
    metadata: DcpMetadata
    files: Mapping[str, "ArchiveFile"]

    def tensors(self) -> dict[str, ChunkedTensor]:
        return {name: self._tensor(name, stored) for name, stored in self.metadata.tensors.items()}

    def _tensor(self, name: str, stored: StoredTensor) -> ChunkedTensor:
        chunks = [
            Chunk.whole(
                chunk.offset,
                chunk.shape,
                ArchivedTensor(
                    name, self.files[chunk.place.file], chunk.place, chunk.shape, stored.dtype
                ),
            )
            for chunk in stored.chunks
        ]
        return ChunkedTensor(stored.shape, stored.dtype, chunks)

    def objects(self) -> list[str]:
        return list(self.metadata.objects)

    def read_object(self, name: str) -> object:
        """An object as pickle_guard.load gives it, without Megatron's list of one around it. Raises CorruptCheckpoint."""
        place = self.metadata.objects[name]
        with _about(name):
            value = torch_zip.read_at(self.files[place.file].file, place.offset, place.nbytes)
        return value[0] if isinstance(value, list) and len(value) == 1 else value


def is_dcp(directory: Path) -> bool:
    return (directory / METADATA_NAME).is_file()


def open_directory(directory: Path) -> DistDirectory:
    """Open a directory. Raises CorruptCheckpoint for a missing or short file, and for impossible metadata."""
    metadata = dcp_metadata.read(directory / METADATA_NAME)
    files = {name: ArchiveFile(InputFile.open(directory / name)) for name in metadata.files}
    places = [
        (name, chunk.place) for name, tensor in metadata.tensors.items() for chunk in tensor.chunks
    ]
    for name, place in (*places, *metadata.objects.items()):
        file = files[place.file].file
        if place.offset + place.nbytes > file.size:
            raise CorruptCheckpoint(
                f"{file.path}: {name} should lie at byte {place.offset}, {place.nbytes} bytes long, but the file has "
                f"{file.size}; copy it again"
            )
    for name, tensor in metadata.tensors.items():
        for chunk in tensor.chunks:
            if byte_count(chunk.shape, tensor.dtype) > chunk.place.nbytes:
                raise CorruptCheckpoint(
                    f"{directory / METADATA_NAME}: {name} has a chunk {list(chunk.shape)} of {tensor.dtype} in "
                    f"{chunk.place.nbytes} bytes; save the checkpoint again"
                )
    return DistDirectory(directory, metadata, files)


@dataclass
class ArchiveFile:
    """One file of archives, or one safetensors file."""

    file: InputFile
    _named: dict[str, FileTensor] | None = field(default=None, repr=False)

    def named(self) -> dict[str, FileTensor]:
        """The tensors of a safetensors file, by name."""
        if self._named is None:
            self._named = safetensors.read(self.file.path)
        return self._named


@dataclass
class ArchivedTensor:
    """A chunk's tensor inside its archive (formats.chunked.Stored)."""

    key: str
    source: ArchiveFile
    place: Range
    shape: Shape
    dtype: str
    _tensor: LazyTensor | None = field(default=None, repr=False)

    def tensor(self) -> LazyTensor:
        """The tensor, which is looked up once. Several threads may do so at the same time, with the same result."""
        if self._tensor is None:
            with _about(self.key):
                self._tensor = self._find()
        return self._tensor

    def _find(self) -> LazyTensor:
        file, start, nbytes = self.source.file, self.place.offset, self.place.nbytes
        found: object
        # torch writes either a zip archive per chunk, or one safetensors file with all chunks.
        if file.read(start, min(nbytes, 4)) == b"PK\3\4":
            found = torch_zip.read_at(file, start, nbytes)
        else:
            found = self.source.named().get(self.key)
        if not isinstance(found, (FileTensor, StridedTensor)):
            raise CorruptCheckpoint(
                f"{file.path}: should hold a tensor at byte {start}, found {found!r:.60}"
            )
        if (found.shape, found.dtype) != (self.shape, self.dtype):
            raise CorruptCheckpoint(
                f"{file.path}: holds {list(found.shape)} {found.dtype} at byte {start}, {METADATA_NAME} says "
                f"{list(self.shape)} {self.dtype}; the files are of different checkpoints"
            )
        return found


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Put a tensor's name before the message of an error."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{key}: {error}", code=error.code) from error


def format_json(backend: str) -> bytes:
    """The content of metadata.json, with the keys that every version of Megatron core understands."""
    keys = {"sharded_backend": backend, "sharded_backend_version": 1, "common_backend": "torch"}
    return json.dumps(keys | {"common_backend_version": 1}).encode()


def read_backend(directory: Path) -> str | None:
    """`torch_dist` or `zarr`, from metadata.json; None without that file. Raises CorruptCheckpoint for a broken file."""
    path = directory / FORMAT_FILE
    if not path.is_file():
        return None
    try:
        backend = read_json(path, CONFIG_BYTES)["sharded_backend"]
    except (KeyError, TypeError) as error:
        raise CorruptCheckpoint(
            f"{path}: should name the checkpoint's sharded_backend ({error})"
        ) from error
    return str(backend)
