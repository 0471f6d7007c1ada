"""Orbax checkpoints of JAX: a tree of arrays, in zarr 2 or 3, each a directory of its own or all in one OCDBT store.

    <step>/_CHECKPOINT_METADATA                 JSON; other steps lie beside it
    <step>/items/_METADATA                      JSON: the path of every array in the tree, use_ocdbt, use_zarr3
    <step>/items/manifest.ocdbt, d/, ocdbt.process_0/ ...      OCDBT: the arrays of all processes
    <step>/items/<path joined by dots>/.zarray, 0.0 ...        without OCDBT
    <step>.orbax-checkpoint-tmp-17...           not finished

tensorstore reads all three; it is imported when an array is opened, and not before. It decodes whole chunks, and keeps those it
read last. A chunk that isn't there would read as zeros, so that all of them are looked for first. Source: orbax-checkpoint
0.12, tensorstore 0.1.86.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from formats.ceilings import CONFIG_BYTES
from formats.errors import CorruptCheckpoint
from formats.lazy_numpy import np
from formats.regular_files import read_json, regular_size
from formats.tensor import ITEMSIZE, Box, Bytes, Shape

METADATA = "_METADATA"
_ITEMS = ("items", "default", "state", "params")
"""What savers call the tree's directory in a step, MaxText's first."""
_UNFINISHED = ".orbax-checkpoint-tmp"
_CACHED_BYTES = 1 << 30
"""Of chunks that were decoded."""
_TREE_BYTES = 64 * CONFIG_BYTES


@dataclass(frozen=True)
class OrbaxTree:
    """A tree's directory; its metadata has been read, no array."""

    path: Path
    arrays: Mapping[tuple[str, ...], str]
    """Path in the tree -> the array's name."""
    ocdbt: bool
    zarr3: bool


def find_tree(path: Path) -> Path | None:
    """The directory of arrays: the path itself, in a step, or in the last of several steps. Raises CorruptCheckpoint."""
    if not path.is_dir():
        return None
    steps = [(int(child.name), child) for child in path.iterdir() if re.fullmatch(r"[0-9]{1,12}", child.name)]
    places = [path, *([max(steps)[1]] if steps else [])]
    return next(
        (each for place in places for each in _trees(place) if (each / METADATA).is_file() and _is_tree(each)), None
    )


def _trees(path: Path) -> Iterator[Path]:
    """Where the tree of a step may be."""
    yield from (path, *(path / name for name in _ITEMS))


def _is_tree(path: Path) -> bool:
    with (path / METADATA).open("rb") as file:
        return b'"tree_metadata"' in file.read(256)


def read_tree(path: Path) -> OrbaxTree:
    """path: as find_tree gives it. Raises CorruptCheckpoint for a checkpoint that isn't finished, or says what can't be."""
    if any(_UNFINISHED in part for part in path.parts[-2:]):
        raise CorruptCheckpoint(f"{path}: Orbax was still writing this when its run ended; take another step")
    metadata = read_json(path / METADATA, _TREE_BYTES)
    try:
        arrays = dict(_arrays(metadata["tree_metadata"]))
        found = OrbaxTree(path, arrays, bool(metadata.get("use_ocdbt", True)), bool(metadata.get("use_zarr3", False)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{path / METADATA}: is not the metadata of an Orbax tree ({error!r:.200})") from error
    for file in path.rglob("*"):
        if not file.is_dir():
            regular_size(file)  # tensorstore would wait for a pipe
    return found


def _arrays(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    for entry in tree.values():
        words = tuple(str(key["key"]) for key in entry["key_metadata"])
        if any(not word or "/" in word or word.startswith(".") for word in words):
            raise ValueError(f"a path {words!r:.100}")
        if entry["value_metadata"]["value_type"] not in ("Dict", "None", "List", "Tuple"):
            yield words, ".".join(words)


def open_arrays(tree: OrbaxTree, names: Mapping[str, str]) -> dict[str, Any]:
    """tensorstore's own arrays by name. names: those that are wanted -> what messages call them.

    Raises CorruptCheckpoint for an array that is missing or lacks a chunk, ImportError without tensorstore.
    """
    import tensorstore as ts

    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHED_BYTES}})
    base: dict[str, Any] = {"driver": "file", "path": f"{tree.path}/"}
    store = {"driver": "ocdbt", "base": base} if tree.ocdbt else base
    try:
        keys = {
            key.decode("utf-8", "replace") for key in ts.KvStore.open(store, context=context).result().list().result()
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
        if array.dtype.name not in ITEMSIZE:
            raise CorruptCheckpoint(f"{tree.path}: {names[name]} is of {array.dtype.name}, which no weights are")
    return opened


def _path(tree: OrbaxTree, name: str) -> str:
    return f"{name}/" if tree.ocdbt else f"{tree.path}/{name}/"


def _require_chunks(tree: OrbaxTree, name: str, array: Any, keys: set[str]) -> None:
    step = array.chunk_layout.write_chunk.shape if tree.zarr3 else array.chunk_layout.read_chunk.shape
    if any(each > max(size, 1) for size, each in zip(array.shape, array.chunk_layout.read_chunk.shape, strict=True)):
        raise CorruptCheckpoint(
            f"{tree.path}: {name} is {list(array.shape)}, its chunks {list(step)}, more than the array"
        )
    grid = [-(-size // each) for size, each in zip(array.shape, step, strict=True)]
    prefix, separator = (f"{name}/c", "/") if tree.zarr3 else (f"{name}/", ".")
    if prod(grid) > len(keys):
        raise CorruptCheckpoint(f"{tree.path}: {name} has {prod(grid)} chunks, and some are missing; copy it again")
    for index in np.ndindex(*grid):
        words = separator.join(map(str, index))
        key = f"{prefix}{separator if tree.zarr3 and words else ''}{words}" if words or tree.zarr3 else f"{prefix}0"
        if key not in keys:
            raise CorruptCheckpoint(f"{tree.path}: the chunk {key} is missing; copy it again", code="missing-file")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__


@dataclass(frozen=True)
class ArrayMatrix:
    """An array's axes, in any order, as a matrix: the first `row_axes` of them are its rows, the others its columns.

    array: tensorstore's, its axes in this order; begun at the first element of each.
    """

    array: Any
    row_axes: int
    shape: Shape
    """Of the matrix, or the vector where there are no columns; may have fewer rows than the array."""
    dtype: str
    where: str
    """For messages."""
    pairs: bool = False
    """Whether the last of the row axes has two halves as neighbours, x0 y0 x1 y1 ..., which are to be read as x0 x1 ... y0 y1 ..."""

    def read_into(self, box: Box, out: Bytes) -> None:
        rows, cols = self.array.shape[: self.row_axes], self.array.shape[self.row_axes :]
        row_slices, first_row, read_rows = _leading(rows, box.row0, box.row1)
        col_slices, first_col, read_cols = _leading(cols, box.col0, box.col1) if cols else ((), 0, 1)
        try:
            values = np.asarray(self.array[(*row_slices, *col_slices)].read().result())
        except (ValueError, OSError) as error:
            raise CorruptCheckpoint(f"{self.where}: can't be read: {_first_line(error)}; copy it again") from error
        if self.pairs:
            axis = self.row_axes - 1
            values = np.concatenate([values.take(range(half, rows[-1], 2), axis) for half in (0, 1)], axis)
        matrix = values.reshape(read_rows, read_cols)
        top, left = box.row0 - first_row, box.col0 - first_col
        wanted = np.ascontiguousarray(matrix[top : top + box.rows, left : left + box.cols])
        np.copyto(out, wanted.view(np.uint8).reshape(box.rows, -1))


def _leading(sizes: Shape, first: int, last: int) -> tuple[tuple[slice, ...], int, int]:
    """(slices that hold elements first to last of these axes, the first element in them, how many)."""
    inner = prod(sizes[1:])
    begin, end = first // inner, -(-last // inner)
    return (slice(begin, end), *(slice(0, size) for size in sizes[1:])), begin * inner, (end - begin) * inner
