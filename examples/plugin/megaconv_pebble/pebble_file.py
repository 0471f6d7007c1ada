"""A `.pebble` file: a whole model, its configuration included.

PEBBLE01                     8 bytes
length of the header         8 bytes, little-endian
header                       JSON, filled up with spaces, so that the tensors start at a multiple of the alignment:
    {"config": {config.json}, "tensors": {name: {"dtype": "bfloat16", "shape": [2, 3], "offset": 0}}}
tensors                      row-major, little-endian, each at its offset from the end of the header
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from formats.errors import CorruptCheckpoint
from formats.output import Record
from formats.tensor import ITEMSIZE, FileTensor, InputFile, Shape, byte_count

MAGIC = b"PEBBLE01"
_START = 16


def read(path: Path) -> tuple[dict[str, Any], dict[str, FileTensor]]:
    """(configuration, lazy tensors by name). Raises CorruptCheckpoint for whatever the format forbids."""
    file = InputFile.open(path)
    if file.read(0, 8) != MAGIC:
        raise CorruptCheckpoint(
            f"{path}: expected {MAGIC!r} at its beginning; it is no .pebble file"
        )
    length = int.from_bytes(file.read(8, 8), "little")
    try:
        header = json.loads(file.read(_START, length))
        tensors = {
            name: _tensor(file, _START + length, entry) for name, entry in header["tensors"].items()
        }
        return dict(header["config"]), tensors
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{path}: its header is damaged ({error}); copy the file again"
        ) from error


def _tensor(file: InputFile, start: int, entry: Mapping[str, Any]) -> FileTensor:
    shape, offset, dtype = tuple(entry["shape"]), entry["offset"], entry["dtype"]
    if dtype not in ITEMSIZE or not all(
        type(size) is int and size >= 0 for size in (*shape, offset)
    ):
        raise ValueError(f"a tensor {entry}")
    return FileTensor(
        file, start + offset, shape, dtype
    )  # which checks that it ends before the file does


class PebbleLayout:
    """A file laid out to the last byte before its first tensor arrives: what megaconv calls a FileLayout."""

    needs_checksums = False

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, tuple[Shape, str]], alignment: int
    ) -> None:
        """tensors: name -> (shape, dtype)."""
        entries, spans, position = {}, {}, 0
        for name, (shape, dtype) in tensors.items():
            entries[name] = {"dtype": dtype, "shape": list(shape), "offset": position}
            spans[name] = (position, byte_count(shape, dtype))
            position = _aligned(position + spans[name][1], alignment)
        text = json.dumps({"config": dict(config), "tensors": entries}).encode()
        start = _aligned(_START + len(text), alignment)
        self._header = MAGIC + (start - _START).to_bytes(8, "little") + text.ljust(start - _START)
        self.size = start + position
        self.records = {
            name: Record(start + offset, nbytes) for name, (offset, nbytes) in spans.items()
        }

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """Everything that is no tensor. Gaps between tensors stay zero."""
        yield 0, self._header


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
