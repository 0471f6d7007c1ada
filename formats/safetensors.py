"""safetensors: eight bytes of header length (little-endian), a JSON header, then the tensors.

    {"__metadata__": {"format": "pt"}, "name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}

Offsets count from the end of the header. Tensors follow each other without gaps. A model in several files has an index
`*.safetensors.index.json`, whose `weight_map` names the file of each tensor. Source: the safetensors README.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from formats.ceilings import HEADER_BYTES, HEADER_VALUES, INDEX_BYTES
from formats.errors import CorruptCheckpoint, UnsafeContent
from formats.mistaken_files import SEEN_BYTES, mistaken
from formats.output import Record
from formats.regular_files import parse_json, read_json
from formats.tensor import ITEMSIZE, FileTensor, InputFile, Shape, as_shape, byte_count

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read(path: Path) -> dict[str, FileTensor]:
    """The tensors of one file, by name. Raises CorruptCheckpoint for everything that the format forbids."""
    file = InputFile.open(path)
    try:
        return _parse(file)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: is not a valid safetensors file ({error})") from error


def read_metadata(path: Path) -> dict[str, str]:
    """The `__metadata__` of a file. Raises CorruptCheckpoint for a header that can't be read."""
    file = InputFile.open(path)
    try:
        metadata = _header(file)[0].get("__metadata__") or {}
        return {str(name): str(text) for name, text in metadata.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: is not a valid safetensors file ({error})") from error


def _header(file: InputFile) -> tuple[dict[str, Any], int]:
    """(the JSON header, its length in bytes)."""
    length = int.from_bytes(file.read(0, 8), "little")
    if 8 + length > file.size:
        instead = mistaken(file.read(0, min(file.size, SEEN_BYTES)))
        if instead:
            raise CorruptCheckpoint(f"{file.path}: {instead}")
        raise ValueError(
            f"a header of {length} bytes is declared, the file has {file.size}; is it complete?"
        )
    if length > HEADER_BYTES:
        raise ValueError(
            f"a header of {length:,} bytes; {HEADER_BYTES:,} are read, share the tensors out over more files"
        )
    header: dict[str, Any] = parse_json(
        file.read(8, length), most_values=HEADER_VALUES, object_pairs_hook=_unique
    )
    return header, length


def _parse(file: InputFile) -> dict[str, FileTensor]:
    header, length = _header(file)
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor(file, start, name, entry) for name, entry in header.items()}
    spans = sorted(
        (tensor.offset, tensor.offset + byte_count(tensor.shape, tensor.dtype))
        for tensor in tensors.values()
    )
    for (_, end), (begin, _) in pairwise([(start, start), *spans, (file.size, file.size)]):
        if end != begin:
            raise ValueError(
                f"tensors overlap or leave a hole at byte {min(end, begin)}, or the file is truncated"
            )
    return tensors


def _tensor(file: InputFile, start: int, name: str, entry: Mapping[str, Any]) -> FileTensor:
    begin, end = as_shape(entry["data_offsets"])
    shape, dtype = as_shape(entry["shape"]), DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{name}: dtype {entry['dtype']!r} is not known")
    if end - begin != prod(shape) * ITEMSIZE[dtype]:
        raise ValueError(
            f"{name}: {list(shape)} of {entry['dtype']} doesn't fill bytes {begin} to {end}"
        )
    return FileTensor(file, start + begin, shape, dtype)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the header has a duplicate key")
    return found


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from an index file. Raises UnsafeContent for a file name outside the directory."""
    try:
        weight_map = read_json(path, INDEX_BYTES)["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(
            f"{path}: is not a valid index (expected an object with weight_map): {error}"
        ) from error
    for file in sorted(set(names.values())):
        if Path(file).name != file or file in ("", ".", ".."):
            raise UnsafeContent(
                f"{path}: names the file {file!r}, which is not in the same directory"
            )
    return names


class SafetensorsLayout:
    """The layout of one file. Tensors are stored in the given order."""

    needs_checksums = False

    def __init__(
        self,
        tensors: Mapping[str, tuple[Shape, str]],
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """tensors: name -> (shape, dtype). metadata: further entries of `__metadata__`."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
        position = 0
        spans: dict[str, tuple[int, int]] = {}
        for name, (shape, dtype) in tensors.items():
            end = position + byte_count(shape, dtype)
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [position, end],
            }
            spans[name] = (position, end)
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        start = len(self._header)
        self.size = start + position
        self.records = {}
        for name, (begin, end) in spans.items():
            self.records[name] = Record(start + begin, end - begin)

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        yield 0, self._header


def shard(
    tensors: Sequence[tuple[str, Shape, str]], max_shard_bytes: int
) -> list[list[tuple[str, Shape, str]]]:
    """Divide tensors over shards in order. A shard is larger than max_shard_bytes only if it holds a single larger
    tensor."""
    shards: list[list[tuple[str, Shape, str]]] = [[]]
    filled = 0
    for name, shape, dtype in tensors:
        size = byte_count(shape, dtype)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape, dtype))
        filled += size
    return shards


def index_json(files: Mapping[str, str], total_bytes: int) -> bytes:
    """The content of the index of a sharded model. files: tensor name -> file name."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()
