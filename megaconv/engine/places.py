"""The places of a canonical tensor's bytes: native names, files, offsets, and the ranks that hold its slices."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from formats.chunked import ChunkedTensor
from formats.tensor import Box, FileTensor, LazyTensor, StridedTensor, matrix_shape
from megaconv.model.assembled import Assembled, Part


class Place(NamedTuple):
    """A rectangle of a canonical tensor, and the native tensor that holds it."""

    native: str
    where: str
    """The rank or file that holds it, as the checkpoint names it; empty if there is only one file."""
    files: tuple[tuple[str, int | None], ...]
    """(file, offset of the native tensor or of a chunk of it in bytes; None if the offset isn't known)."""
    box: Box
    """The rectangle in the canonical tensor, which is viewed as a matrix."""
    copy: bool
    """True if it is a further copy: another rank's replica, or a tied tensor's second name."""

    def to_json(self) -> dict[str, Any]:
        return {
            "native": self.native,
            "where": self.where,
            "files": [{"file": file, "offset": offset} for file, offset in self.files],
            "rows": [self.box.row0, self.box.row1],
            "columns": [self.box.col0, self.box.col1],
            "copy": self.copy,
        }


def places(tensor: LazyTensor) -> list[Place]:
    """The places of a tensor in the order of its rows. Reads the files' directories, but no tensor."""
    if not isinstance(tensor, Assembled):
        rows, cols = matrix_shape(tuple(tensor.shape))
        return [Place("", "", tuple(_files(tensor)), Box(0, rows, 0, cols), copy=False)]
    own = [_place(part, copy=False) for part in tensor.parts]
    return sorted(_joined(own), key=lambda place: place.box) + list(
        _joined([_place(copy.part, copy=True) for copy in tensor.copies])
    )


def _place(part: Part, *, copy: bool) -> Place:
    return Place(part.native, part.where, tuple(_files(part.source)), part.region.box, copy)


def _follows(place: Place, last: Place) -> bool:
    """True if a place's rows come right after those of another place in the same native tensor."""
    same_tensor = last[:3] == place[:3]
    same_columns = last.box[2:] == place.box[2:]
    return same_tensor and same_columns and last.box.row1 == place.box.row0


def _joined(found: list[Place]) -> Iterator[Place]:
    """The places with adjacent rectangles of one native tensor merged into one place."""
    last: Place | None = None
    for place in found:
        if last is not None and _follows(place, last):
            last = last._replace(box=last.box._replace(row1=place.box.row1))
            continue
        if last is not None:
            yield last
        last = place
    if last is not None:
        yield last


def _files(source: object) -> Iterator[tuple[str, int | None]]:
    if isinstance(source, (FileTensor, StridedTensor)):
        yield str(source.file.path), source.offset
    elif isinstance(source, ChunkedTensor):
        for chunk in source.chunks:
            yield from _files(chunk.stored.tensor())
    else:  # a tensor computed from another one: reshaped, cast, dequantized
        inner = getattr(source, "source", None) or getattr(source, "values", None)
        if inner is not None:
            yield from _files(inner)


def relative(
    files: tuple[tuple[str, int | None], ...], root: Path
) -> tuple[tuple[str, int | None], ...]:
    """The same files with names relative to the checkpoint's directory."""
    return tuple((_below(file, root), offset) for file, offset in files)


def _below(file: str, root: Path) -> str:
    path = Path(file)
    return str(path.relative_to(root)) if path.is_relative_to(root) else file
