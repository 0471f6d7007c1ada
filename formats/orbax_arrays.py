"""Orbax checkpoints of JAX: a tree of arrays, in zarr 2 or 3. Each array is a directory, or one OCDBT store holds all
of them.

    <step>/_CHECKPOINT_METADATA                 JSON; other steps are next to it
    <step>/items/_METADATA                      JSON: the path of every array in the tree, use_ocdbt, use_zarr3
    <step>/items/manifest.ocdbt, d/, ocdbt.process_0/ ...      OCDBT: the arrays of all processes
    <step>/items/<path joined by dots>/.zarray, 0.0 ...        without OCDBT
    <step>.orbax-checkpoint-tmp-17...           not finished

tensorstore reads all three kinds. It is imported when an array is opened, and not before. It decodes whole chunks, and
caches the last ones. It would read a missing chunk as zeros, so megaconv first checks that all chunks exist. Source:
orbax-checkpoint 0.12, tensorstore 0.1.86.
"""

import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from formats.ceilings import TREE_BYTES
from formats.errors import CorruptCheckpoint, NotEnoughSpace
from formats.lazy_numpy import np
from formats.partial_files import fetch_whole
from formats.partial_files import find as find_partial
from formats.regular_files import read_json, regular_size
from formats.tensor import ITEMSIZE, Box, Bytes, InputFile, Shape

_log = logging.getLogger("megaconv")

METADATA = "_METADATA"
_ITEMS = ("items", "default", "state", "params")
"""Names that savers give the tree's directory in a step; MaxText's is the first."""
_UNFINISHED = ".orbax-checkpoint-tmp"
_CACHED_BYTES = 1 << 30
"""Size of the cache of decoded chunks."""


@dataclass(frozen=True)
class OrbaxTree:
    """The directory of a tree, whose metadata has been read. No array has been read."""

    path: Path
    arrays: Mapping[tuple[str, ...], str]
    """Path in the tree -> name of the array."""
    ocdbt: bool
    zarr3: bool


def find_tree(path: Path) -> Path | None:
    """The directory of arrays: the path itself, or the one in a step, or the one in the last of several steps. Raises
    CorruptCheckpoint."""
    if not path.is_dir():
        return None
    steps = [
        (int(child.name), child)
        for child in path.iterdir()
        if re.fullmatch(r"[0-9]{1,12}", child.name)
    ]
    places = [path, *([max(steps)[1]] if steps else [])]
    return next(
        (
            each
            for place in places
            for each in _trees(place)
            if (each / METADATA).is_file() and _is_tree(each)
        ),
        None,
    )


def _trees(path: Path) -> Iterator[Path]:
    """Yield the directories that may hold the tree of a step."""
    yield from (path, *(path / name for name in _ITEMS))


def _is_tree(path: Path) -> bool:
    file = InputFile.open(path / METADATA)
    return b'"tree_metadata"' in file.read(0, min(file.size, 256))


def read_tree(path: Path) -> OrbaxTree:
    """Read the metadata of a tree. path: as find_tree returns it.

    Raises CorruptCheckpoint for an unfinished checkpoint and for impossible metadata.
    """
    if any(_UNFINISHED in part for part in path.parts[-2:]):
        raise CorruptCheckpoint(
            f"{path}: Orbax was still writing this when its run ended; take another step"
        )
    metadata = read_json(path / METADATA, TREE_BYTES)
    try:
        arrays = dict(_arrays(metadata["tree_metadata"]))
        found = OrbaxTree(
            path,
            arrays,
            bool(metadata.get("use_ocdbt", True)),
            bool(metadata.get("use_zarr3", False)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(
            f"{path / METADATA}: is not the metadata of an Orbax tree ({error!r:.200})"
        ) from error
    for file in path.rglob("*"):
        if not file.is_dir():
            regular_size(file)  # tensorstore would wait forever for a pipe
    return found


def _arrays(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    for entry in tree.values():
        words = tuple(str(key["key"]) for key in entry["key_metadata"])
        if any(not word or "/" in word or word.startswith(".") for word in words):
            raise ValueError(f"a path {words!r:.100}")
        if entry["value_metadata"]["value_type"] not in ("Dict", "None", "List", "Tuple"):
            yield words, ".".join(words)


def open_arrays(tree: OrbaxTree, names: Mapping[str, str]) -> dict[str, Any]:
    """tensorstore's arrays by name. names: name of each wanted array -> its name in messages.

    Raises CorruptCheckpoint for an array that is missing or lacks a chunk, and ImportError without tensorstore.
    """
    import tensorstore as ts

    _fetch_remote(tree.path)
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHED_BYTES}})
    base: dict[str, Any] = {"driver": "file", "path": f"{tree.path}/"}
    store = {"driver": "ocdbt", "base": base} if tree.ocdbt else base
    try:
        keys = {
            key.decode("utf-8", "replace")
            for key in ts.KvStore.open(store, context=context).result().list().result()
        }
        pending = {
            name: ts.open(
                {"driver": "zarr3" if tree.zarr3 else "zarr", "kvstore": {**store, "path": _path(tree, name)}},
                context=context, open=True, read=True,
            )
            for name in names
        }  # fmt: skip
        opened = {name: future.result() for name, future in pending.items()}
    except (ValueError, OSError) as error:
        raise CorruptCheckpoint(
            f"{tree.path}: tensorstore can't open it: {_first_line(error)}; copy it again"
        ) from error
    for name, array in opened.items():
        _require_chunks(tree, name, array, keys)
        if array.dtype.name not in ITEMSIZE or "float" not in array.dtype.name:
            raise CorruptCheckpoint(
                f"{tree.path}: {names[name]} is of {array.dtype.name}, which no weights are"
            )
    return opened


def _fetch_remote(path: Path) -> None:
    """Fetch all files of a tree in a store: tensorstore opens the files itself. Raises NotEnoughSpace."""
    files = [file for file in path.rglob("*") if find_partial(file) is not None]
    if not files:
        return
    nbytes = sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(path).free
    if nbytes > free:
        raise NotEnoughSpace(
            f"{path}: tensorstore reads local files only: {nbytes:,} bytes would be fetched to {tempfile.gettempdir()}, "
            f"which has {free:,}; set TMPDIR to a larger disk"
        )
    _log.warning("%s: %s bytes are fetched to a temporary directory", path, f"{nbytes:,}")
    fetch_whole(files)


def _path(tree: OrbaxTree, name: str) -> str:
    return f"{name}/" if tree.ocdbt else f"{tree.path}/{name}/"


def _require_chunks(tree: OrbaxTree, name: str, array: Any, keys: set[str]) -> None:
    """Raise CorruptCheckpoint if a chunk of an array is larger than the array, or missing."""
    read_chunk = array.chunk_layout.read_chunk.shape
    stored_chunk = array.chunk_layout.write_chunk.shape if tree.zarr3 else read_chunk
    for size, step in zip(array.shape, read_chunk, strict=True):
        if step > max(size, 1):
            raise CorruptCheckpoint(
                f"{tree.path}: {name} is {list(array.shape)}, its chunks {list(stored_chunk)}, more than the array"
            )
    grid = [-(-size // step) for size, step in zip(array.shape, stored_chunk, strict=True)]
    if prod(grid) > len(keys):
        raise CorruptCheckpoint(
            f"{tree.path}: {name} has {prod(grid)} chunks, and some are missing; copy it again"
        )
    beginning, separator = _chunk_keys(array, zarr3=tree.zarr3)
    for index in np.ndindex(*grid):
        numbers = (*beginning, *map(str, index))
        key = f"{name}/{separator.join(numbers) or '0'}"
        if key not in keys:
            raise CorruptCheckpoint(
                f"{tree.path}: the chunk {key} is missing; copy it again", code="missing-file"
            )


def _chunk_keys(array: Any, *, zarr3: bool) -> tuple[tuple[str, ...], str]:
    """(what each chunk's key begins with, the separator), as the array's own metadata say.

    zarr 2 has NAME/2.0 or NAME/2/0, and NAME/0 for a scalar; zarr 3 NAME/c/2/0 or NAME/c.2.0, NAME/c for a scalar, or
    zarr 2's keys. tensorstore would read a chunk under another key as zeros.
    """
    metadata = array.spec().to_json()["metadata"]
    if not zarr3:
        return (), metadata["dimension_separator"]
    encoding = metadata["chunk_key_encoding"]
    is_default = encoding["name"] == "default"
    usual = "/" if is_default else "."
    separator = encoding.get("configuration", {}).get("separator", usual)
    return ("c",) if is_default else (), separator


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__


@dataclass(frozen=True)
class ArrayMatrix:
    """An array as a matrix, with its axes in any order: the first `row_axes` axes are the rows, the others the columns.

    array: tensorstore's array, with its axes in this order, and origin 0 on each axis.
    """

    array: Any
    row_axes: int
    shape: Shape
    """Shape of the matrix, or of the vector if there are no columns. It may have fewer rows than the array."""
    dtype: str
    where: str
    """The array's name in messages."""
    pairs: bool = False
    """True if the last row axis holds two halves as neighbours, x0 y0 x1 y1 ...; it is then read as x0 x1 ... y0 y1 ...
    """

    def read_into(self, box: Box, out: Bytes) -> None:
        # The slices cover whole indices of the first row and column axis, so they may read more than the box.
        rows = self.array.shape[: self.row_axes]
        cols = self.array.shape[self.row_axes :]
        row_slices, first_row, read_rows = _leading(rows, box.row0, box.row1)
        col_slices, first_col, read_cols = (
            _leading(cols, box.col0, box.col1) if cols else ((), 0, 1)
        )
        values = self._read((*row_slices, *col_slices))
        if self.pairs:
            values = self._halves_apart(values)
        matrix = values.reshape(read_rows, read_cols)
        top = box.row0 - first_row
        left = box.col0 - first_col
        wanted = matrix[top : top + box.rows, left : left + box.cols]
        wanted_bytes = np.ascontiguousarray(wanted).view(np.uint8)
        np.copyto(out, wanted_bytes.reshape(box.rows, -1))

    def _read(self, slices: tuple[slice, ...]) -> Any:
        try:
            return np.asarray(self.array[slices].read().result())
        except (ValueError, OSError) as error:
            raise CorruptCheckpoint(
                f"{self.where}: can't be read: {_first_line(error)}; copy it again"
            ) from error

    def _halves_apart(self, values: Any) -> Any:
        """x0 y0 x1 y1 ... along the last row axis becomes x0 x1 ... y0 y1 ..."""
        axis = self.row_axes - 1
        size = values.shape[axis]
        first = values.take(range(0, size, 2), axis)
        second = values.take(range(1, size, 2), axis)
        return np.concatenate([first, second], axis)


def _leading(sizes: Shape, first: int, last: int) -> tuple[tuple[slice, ...], int, int]:
    """(slices that hold elements first to last of these axes, number of the first element in them, number of elements)."""
    inner = prod(sizes[1:])
    begin, end = first // inner, -(-last // inner)
    return (
        (slice(begin, end), *(slice(0, size) for size in sizes[1:])),
        begin * inner,
        (end - begin) * inner,
    )
