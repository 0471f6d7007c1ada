"""Megatron's `zarr` checkpoints: a directory of zarr 2 arrays, and a torch file for every other object.

    <directory>/<key>/.zarray                {"shape": [4, 64, 32], "chunks": [1, 32, 32], "dtype": "bfloat16", ...}
    <directory>/<key>/2.1.0                  one chunk, nothing but its elements; chunks at the edge have the full size
    <directory>/<key>/shard_1.0_2.2.pt       one object of a grid [2, 2], as torch.save writes it
    <directory>/<key>.sync/                  locks that the writer left behind

Arrays are never compressed, so plain file reads are enough. Megatron core 0.4 to 0.7 named objects of a grid with more
than one axis `shard_1.0_2.pt`, without the part after the last dot. Every version reads that name. Source:
megatron/core/dist_checkpointing/strategies/zarr.py and tensorstore.py, core 0.4 to 0.15; the zarr v2 specification.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

from formats import torch_zip
from formats.ceilings import CONFIG_BYTES
from formats.chunked import Chunk, ChunkedTensor
from formats.errors import CorruptCheckpoint
from formats.opened import note
from formats.output import Record
from formats.regular_files import read_json
from formats.tensor import FileTensor, InputFile, LazyTensor, Shape, as_shape, byte_count

ARRAY_FILE = ".zarray"

_DTYPES = {
    "bfloat16": "bfloat16", "<V2": "bfloat16", "|V2": "bfloat16", "<f2": "float16", "<f4": "float32", "<f8": "float64",
    "<i8": "int64", "<i4": "int32", "<i2": "int16", "|i1": "int8", "|u1": "uint8", "|b1": "bool",
}  # fmt: skip
"""zarr's dtype -> name. zarr has no bfloat16: Megatron wrote that name itself, and at first the two bytes that numpy
saw."""
_NAMES = {dtype: name for name, dtype in reversed(_DTYPES.items())}


@dataclass(frozen=True)
class ZarrDirectory:
    """An opened directory. No chunk and no object has been read."""

    path: Path
    arrays: Mapping[str, ChunkedTensor]
    files: Mapping[str, Path]
    """Name of an object -> its file."""

    def tensors(self) -> Mapping[str, ChunkedTensor]:
        return self.arrays

    def objects(self) -> list[str]:
        return list(self.files)

    def read_object(self, name: str) -> object:
        return torch_zip.read(self.files[name])


def open_directory(directory: Path) -> ZarrDirectory:
    """Open a directory. Raises CorruptCheckpoint for missing and short chunks, and for arrays that Megatron doesn't
    write."""
    arrays: dict[str, ChunkedTensor] = {}
    files: dict[str, Path] = {}
    folders = [entry for entry in directory.iterdir() if entry.is_dir()]
    for folder in sorted(folders):
        if folder.name.endswith(".sync"):
            continue
        described = folder / ARRAY_FILE
        if described.is_file() and described.stat().st_size:
            arrays[folder.name] = _read_array(folder)
        files |= {f"{folder.name}/{file.stem}": file for file in folder.glob("shard_*.pt")}
    return ZarrDirectory(directory, arrays, files)


@dataclass(frozen=True)
class _ChunkFile:
    """A chunk (formats.chunked.Stored). It is opened for every read: the limit of open files may be lower than the
    number of chunks."""

    path: Path
    shape: Shape
    dtype: str

    def tensor(self) -> LazyTensor:
        return FileTensor(InputFile.open(self.path), 0, self.shape, self.dtype)


def _read_array(folder: Path) -> ChunkedTensor:
    path = folder / ARRAY_FILE
    try:
        shape, step, dtype = _describe(read_json(path, CONFIG_BYTES))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(
            f"{path}: is not a zarr array that Megatron writes ({error}); save it again"
        ) from error
    found = {entry.name: entry.stat() for entry in folder.iterdir()}
    counts = [-(-whole // size) for whole, size in zip(shape, step, strict=True)]
    names = (_name(place) for place in _places(counts))
    # Checking len(found) + 1 names is enough: not all of them can exist. A hostile number costs no more time.
    missing = next((name for name in islice(names, len(found) + 1) if name not in found), None)
    if missing is not None:
        raise CorruptCheckpoint(
            f"{folder / missing}: no such file; the array {folder.name} has {prod(counts)} chunks"
        )
    chunks = []
    for index in _places(counts):
        name = _name(index)
        note(folder / name, found[name])
        size = found[name].st_size
        if size != byte_count(step, dtype):
            raise CorruptCheckpoint(
                f"{folder / name}: has {size} bytes, a chunk {list(step)} of {dtype} {byte_count(step, dtype)}; copy it again"
            )
        offset = tuple(place * size for place, size in zip(index, step, strict=True))
        held = tuple(
            min(size, whole - first) for first, size, whole in zip(offset, step, shape, strict=True)
        )
        chunks.append(Chunk(offset, held, _ChunkFile(folder / name, step, dtype), step))
    return ChunkedTensor(shape, dtype, chunks)


def _places(counts: Sequence[int]) -> Iterator[Shape]:
    """Yield all places of a grid in row-major order, one by one, since a hostile array may claim any number of places."""
    if not counts:
        yield ()
        return
    if 0 in counts:
        return
    for first in range(counts[0]):
        yield from ((first, *rest) for rest in _places(counts[1:]))


def _name(place: Shape) -> str:
    """The file name of one chunk."""
    return ".".join(map(str, place)) or "0"


_READABLE = {
    "zarr_format": 2,
    "order": "C",
    "compressor": None,
    "filters": None,
    "dimension_separator": ".",
}
"""The only value of each property that Megatron writes and this module reads."""


def _describe(array: Mapping[str, Any]) -> tuple[Shape, Shape, str]:
    """(shape, shape of a chunk, dtype). Raises ValueError for properties that zarr allows and Megatron never writes."""
    shape = as_shape(array["shape"])
    step = as_shape(array["chunks"])
    if len(shape) != len(step) or 0 in step:
        raise ValueError(f"a shape {list(shape)} in chunks {list(step)}")
    for name, value in _READABLE.items():
        found = array.get(name, value)
        if found != value:
            raise ValueError(f"its {name} is {found!r:.60}, only {value!r} can be read")
    dtype = array["dtype"]
    if dtype not in _DTYPES:
        raise ValueError(f"its dtype {dtype!r:.60} can't be read")
    return shape, step, _DTYPES[dtype]


# Writing.


class ChunkLayout:
    """The layout of a chunk's file (a formats.output.FileLayout). The only record is the whole file."""

    needs_checksums = False
    RECORD = "chunk"

    def __init__(self, shape: Shape, dtype: str) -> None:
        self.size = byte_count(shape, dtype)
        self.records = {self.RECORD: Record(0, self.size)}

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        return iter(())


def array_json(shape: Shape, step: Shape, dtype: str) -> bytes:
    """The content of `.zarray`. Raises CorruptCheckpoint for a dtype that these arrays don't support."""
    if dtype not in _NAMES:
        raise CorruptCheckpoint(
            f"zarr arrays of {dtype} can't be written; give --dtype, or choose torch_dist"
        )
    fixed = {
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "zarr_format": 2,
    }
    array = {"chunks": list(step), "dtype": _NAMES[dtype], "shape": list(shape), **fixed}
    return json.dumps(array, indent=4, sort_keys=True).encode()


def object_name(place: Shape, grid: Shape) -> str:
    """The file name of one object of a grid, in the form that all versions of Megatron look for."""
    name = f"shard_{'.'.join(map(str, place))}_{'.'.join(map(str, grid))}"
    return (name if len(grid) == 1 else name.rpartition(".")[0]) + ".pt"
