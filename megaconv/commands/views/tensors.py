"""`inspect --tensors [GLOB]`: every tensor with its shape and dtype, and the places of its bytes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from formats.tensor import LazyTensor, matrix_shape
from megaconv.commands.stored import StoredTensor
from megaconv.engine.places import Place, places, relative
from megaconv.model.ir import WEIGHT, Source


@dataclass(frozen=True)
class TensorLine:
    name: str
    shape: tuple[int, ...]
    dtype: str
    places: tuple[Place, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "places": [place.to_json() for place in self.places],
        }

    def lines(self) -> Iterator[str]:
        """Lines for people: the tensor, and below it each native tensor that holds a part of it."""
        yield f"{self.name}  {list(self.shape)} {self.dtype}"
        for place in self.places:
            yield f"    {self._place(place)}".rstrip()

    def _place(self, place: Place) -> str:
        """The line of a native tensor: its rank, its name, the part that it holds, and its files."""
        rows, cols = matrix_shape(self.shape)
        box = place.box
        row_slice = _slice("rows", box.row0, box.row1, rows)
        col_slice = _slice("columns", box.col0, box.col1, cols)
        again = " (again)" if place.copy else ""
        native = place.native or self.name
        files = ", ".join(_file(file, offset) for file, offset in place.files)
        return f"{_where(place)}{native}{row_slice}{col_slice}{again}  {files}"


def _file(name: str, offset: int | None) -> str:
    return name if offset is None else f"{name} at {offset:,}"


def _where(place: Place) -> str:
    """The rank and the virtual stage in front of a name; the rank only if no file's name has it."""
    rank, _, virtual_stage = place.where.partition(" (")  # `mp_rank_00_001 (model1)`
    names_rank = any(rank in file for file, _ in place.files)
    shown = virtual_stage.rstrip(")") if names_rank else place.where
    return f"{shown}: " if shown else ""


def _slice(what: str, start: int, stop: int, whole: int) -> str:
    return "" if (start, stop) == (0, whole) else f" {what} {start:,}-{stop - 1:,}"


def of_source(source: Source, root: Path | None, glob: str) -> list[TensorLine]:
    """The weights of an opened checkpoint whose canonical or native name matches.

    root: file names are relative to it.
    """
    return [
        line
        for key, tensor in source.tensors()
        if key.slot == WEIGHT and (line := _line(key.name, tensor, root, glob))
    ]


def _line(name: str, tensor: LazyTensor, root: Path | None, glob: str) -> TensorLine | None:
    found = places(tensor)
    if not fnmatchcase(name, glob) and not any(fnmatchcase(place.native, glob) for place in found):
        return None
    # A distributed checkpoint has one rank with the directory's name, which the file names show already.
    found = [
        place._replace(where="")
        if any(file.startswith(place.where) for file, _ in place.files)
        else place
        for place in found
    ]
    if root is not None:
        found = [place._replace(files=relative(place.files, root)) for place in found]
    return TensorLine(name, tuple(tensor.shape), tensor.dtype, tuple(found))


def stored_lines(tensors: tuple[StoredTensor, ...], glob: str) -> Iterator[str]:
    """Lines for a checkpoint of an unknown model, with the names in its files."""
    for tensor in fitting(tensors, glob):
        at = "" if tensor.offset is None else f" at {tensor.offset:,}"
        yield f"{tensor.name}  {list(tensor.shape)} {tensor.dtype}  {tensor.file}{at}"


def fitting(tensors: tuple[StoredTensor, ...], glob: str) -> list[StoredTensor]:
    return [tensor for tensor in tensors if fnmatchcase(tensor.name, glob)]


def to_json(found: list[TensorLine]) -> Mapping[str, Any]:
    return {line.name: line.to_json() for line in found}
