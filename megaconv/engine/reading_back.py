"""Assembles the tensors of a finished output as they were streamed, for `--verify` and `verify`.

This serves outputs that no loader reads in that form: GGUF's blocks and float32 norms, and adapters without their
model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from formats.tensor import ITEMSIZE, LazyTensor, byte_count, reshaped
from megaconv.engine.plan import OutputPlan, Placement
from megaconv.errors import ModelsDiffer
from megaconv.model.assembled import Assembled, Part
from megaconv.model.ir import Header, Key, OpenedSource


class Stored(NamedTuple):
    """An output with the values that were written, if readers get other values."""

    source: OpenedSource
    descriptions: Mapping[str, bytes]
    """Descriptions of the model by file: the content of weight files beside their tensors."""


def as_streamed(
    path: Path, natives: Mapping[str, LazyTensor], header: Header, plan: OutputPlan
) -> OpenedSource:
    """The streamed tensors, assembled from the native tensors of an output.

    natives: all tensors at path, by record, in the dtypes of the stream, dequantized if the stream's are. If records of
    several files have equal names: by file and record, with a slash between them. Raises ModelsDiffer for a tensor that
    differs from the plan.
    """
    found = dict[Key, LazyTensor]()
    for key, info in header.manifest.items():
        parts = list[Part]()
        for place in plan.placements[key]:
            native = natives.get(f"{place.file}/{place.record}", natives.get(place.record))
            size = plan.files[place.file].records[place.record].nbytes
            matrix = _as_matrix(path, place, native, info.dtype, size)
            for region in place.regions:
                parts.append(Part(region, matrix, place.record, str(path)))
        found[key] = Assembled(key, info.shape, info.dtype, parts)
    return OpenedSource(header, found)


def _as_matrix(
    path: Path, place: Placement, native: LazyTensor | None, dtype: str, size: int
) -> LazyTensor:
    """The native tensor as a matrix with the rows that regions count.

    size: the bytes of the record. A dequantized tensor has as many elements as its record has bytes.
    """
    wrong = ModelsDiffer(
        f"{path}: {place.record} reads back differently from what was written; is the disk faulty?"
    )
    if native is None or native.dtype != dtype:
        raise wrong
    elements = byte_count(native.shape, dtype) // ITEMSIZE[dtype]
    if size not in (elements * ITEMSIZE[dtype], elements):
        raise wrong
    rows = size // place.row_bytes
    return reshaped(native, (rows, elements // rows))
