"""Files of named arrays: Megatron's HDF5 files, and our own `.npy` files. Both are memory-mapped for reading.

    megatron    STEM.hdf5            all arrays of the stem; needs h5py
    numpy       STEM.NAME.npy        one array each

A file appears by one rename, complete.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from megatron_lite.data.packages import package

Array = NDArray[Any]


@dataclass(frozen=True)
class Planned:
    """An array that is written block by block. The rows of the blocks add up to the shape."""

    shape: tuple[int, ...]
    dtype: str
    blocks: Iterable[Array]


def whole(array: Array) -> Planned:
    """Return the plan of an array in memory."""
    return Planned(array.shape, array.dtype.str, [array])


class ArrayFiles(Protocol):
    """One way to store named arrays."""

    name: str
    suffix: str
    """Ends the file that `stems` looks for."""

    def has(self, stem: Path, *names: str) -> bool:
        """Return whether all arrays are there."""
        ...

    def read(self, stem: Path, name: str) -> Array:
        """Return a read-only memory map. Raises CorruptCheckpoint."""
        ...

    def write(self, stem: Path, arrays: Mapping[str, Planned]) -> None:
        """Write the arrays. A reader sees each file complete or not at all."""
        ...


class Hdf5Files:
    """Megatron's files. Its arrays are contiguous, so that they can be mapped."""

    name = "megatron"
    suffix = ".hdf5"

    def has(self, stem: Path, *names: str) -> bool:
        return self._path(stem).is_file()

    def read(self, stem: Path, name: str) -> Array:
        path = self._path(stem)
        _require(path)
        try:
            with h5py_module().File(path, "r") as file:
                found = file[name]
                shape, dtype = found.shape, found.dtype
                offset = found.id.get_offset()
        except (OSError, KeyError, AttributeError) as error:
            raise CorruptCheckpoint(f"{path}: has no readable array {name!r}: {error}") from error
        if 0 in shape:
            return np.empty(shape, dtype)
        if offset is None:
            raise CorruptCheckpoint(
                f"{path}: stores the array {name!r} in pieces; Megatron writes it contiguous"
            )
        return _mapped(path, dtype, shape, offset)

    def write(self, stem: Path, arrays: Mapping[str, Planned]) -> None:
        path = self._path(stem)
        unfinished = _unfinished(path)
        with h5py_module().File(unfinished, "w") as file:
            for name, planned in arrays.items():
                made = file.create_dataset(name, planned.shape, np.dtype(planned.dtype))
                _fill(made, planned)
        unfinished.replace(path)

    def _path(self, stem: Path) -> Path:
        return stem.with_name(f"{stem.name}{self.suffix}")


class NumpyFiles:
    """Our own files."""

    name = "numpy"
    suffix = ".npy"

    def has(self, stem: Path, *names: str) -> bool:
        return all(self._path(stem, name).is_file() for name in names)

    def read(self, stem: Path, name: str) -> Array:
        path = self._path(stem, name)
        _require(path)
        try:
            found: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise CorruptCheckpoint(f"{path}: is not a readable array: {error}") from error
        return found.view(np.ndarray)

    def write(self, stem: Path, arrays: Mapping[str, Planned]) -> None:
        for name, planned in arrays.items():
            path = self._path(stem, name)
            unfinished = _unfinished(path)
            if 0 in planned.shape:  # nothing can be mapped
                with unfinished.open("wb") as file:
                    np.save(file, np.empty(planned.shape, planned.dtype))
            else:
                made = open_memmap(unfinished, "w+", np.dtype(planned.dtype), planned.shape)
                _fill(made, planned)
                made.flush()
            unfinished.replace(path)

    def _path(self, stem: Path, name: str) -> Path:
        return stem.with_name(f"{stem.name}.{name}{self.suffix}")


FORMATS: dict[str, ArrayFiles] = {"numpy": NumpyFiles(), "megatron": Hdf5Files()}


def h5py_module() -> Any:
    return package("h5py", "a Retro project in Megatron's format", "retrieval")


def _require(path: Path) -> None:
    if not path.is_file():
        raise CorruptCheckpoint(f"{path}: no such file; build the project again, or finish it")


def _mapped(path: Path, dtype: Any, shape: tuple[int, ...], offset: int) -> Array:
    try:
        return np.memmap(path, dtype, "r", offset, shape).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path}: ends too early: {error}") from error


def _unfinished(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}")


def _fill(target: Any, planned: Planned) -> None:
    start = 0
    for block in planned.blocks:
        end = start + len(block)
        target[start:end] = block
        start = end
    if start != planned.shape[0]:
        raise CorruptCheckpoint(f"an array of {planned.shape[0]:,} rows got {start:,}")
