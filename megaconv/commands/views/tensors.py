"""`inspect --tensors [GLOB]`: every tensor with its shape and dtype, and where its bytes lie."""

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
        return {"shape": list(self.shape), "dtype": self.dtype, "places": [place.to_json() for place in self.places]}

    def lines(self) -> Iterator[str]:
        """For people: the tensor, and below it each native tensor that holds some of it."""
        yield f"{self.name}  {list(self.shape)} {self.dtype}"
        rows, cols = matrix_shape(self.shape)
        for place in self.places:
            slices = _slice("rows", place.box.row0, place.box.row1, rows) + _slice(
                "columns", place.box.col0, place.box.col1, cols
            )
            held = ", ".join(f"{file} at {offset:,}" if offset is not None else file for file, offset in place.files)
            again = " (again)" if place.copy else ""
            rank, _, chunk = place.where.partition(" (")  # of a virtual pipeline: `... (model1)`
            told = any(rank in file for file, _ in place.files)
            where = (f"{chunk.rstrip(')')}: " if chunk else "") if told else f"{place.where}: " if place.where else ""
            yield f"    {where}{place.native or self.name}{slices}{again}  {held}".rstrip()


def _slice(what: str, start: int, stop: int, whole: int) -> str:
    return "" if (start, stop) == (0, whole) else f" {what} {start:,}-{stop - 1:,}"


def of_source(source: Source, root: Path | None, glob: str) -> list[TensorLine]:
    """The weights of an opened checkpoint whose canonical or native name fits. root: names of files begin below it."""
    return [
        line for key, tensor in source.tensors() if key.slot == WEIGHT and (line := _line(key.name, tensor, root, glob))
    ]


def _line(name: str, tensor: LazyTensor, root: Path | None, glob: str) -> TensorLine | None:
    found = places(tensor)
    if not fnmatchcase(name, glob) and not any(fnmatchcase(place.native, glob) for place in found):
        return None
    # A distributed checkpoint is one rank, called by its directory, of which the files' names tell already.
    found = [
        place._replace(where="") if any(file.startswith(place.where) for file, _ in place.files) else place
        for place in found
    ]
    if root is not None:
        found = [place._replace(files=relative(place.files, root)) for place in found]
    return TensorLine(name, tuple(tensor.shape), tensor.dtype, tuple(found))


def stored_lines(tensors: tuple[StoredTensor, ...], glob: str) -> Iterator[str]:
    """Of a checkpoint that nobody knows, by the names that its files have."""
    for tensor in fitting(tensors, glob):
        at = "" if tensor.offset is None else f" at {tensor.offset:,}"
        yield f"{tensor.name}  {list(tensor.shape)} {tensor.dtype}  {tensor.file}{at}"


def fitting(tensors: tuple[StoredTensor, ...], glob: str) -> list[StoredTensor]:
    return [tensor for tensor in tensors if fnmatchcase(tensor.name, glob)]


def to_json(found: list[TensorLine]) -> Mapping[str, Any]:
    return {line.name: line.to_json() for line in found}
