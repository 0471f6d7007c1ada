"""Reads the header of a GGUF file (llama.cpp's format): the model's name and description, without reading a weight.

    GGUF · version 2 or 3 (u32) · number of tensors (u64) · number of keys (u64)
    keys:     name · type (u32) · value
    tensors:  name · axes (u32) · sizes (u64 each, the innermost first) · type (u32) · offset in the data section (u64)

A name is a u64 length and that many bytes of UTF-8. The data section begins at the next multiple of
`general.alignment`. All numbers are little-endian. Source: docs/gguf.md of ggml, and its table of types.
"""

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

from formats.ceilings import AXES, AXIS, GGUF_ENTRIES, GGUF_HEADER_BYTES, GGUF_STRINGS
from formats.errors import CorruptCheckpoint
from formats.regular_files import regular_size
from formats.streams import open_stream
from formats.tensor import Shape

MAGIC = b"GGUF"


class GgufType(NamedTuple):
    """A storage type: elements are stored in blocks of `block` elements, with `nbytes` bytes per block."""

    name: str
    block: int
    nbytes: int


TYPES = {
    0: GgufType("float32", 1, 4), 1: GgufType("float16", 1, 2), 30: GgufType("bfloat16", 1, 2), 28: GgufType("float64", 1, 8),
    24: GgufType("int8", 1, 1), 25: GgufType("int16", 1, 2), 26: GgufType("int32", 1, 4), 27: GgufType("int64", 1, 8),
    2: GgufType("q4_0", 32, 18), 3: GgufType("q4_1", 32, 20), 6: GgufType("q5_0", 32, 22), 7: GgufType("q5_1", 32, 24),
    8: GgufType("q8_0", 32, 34), 9: GgufType("q8_1", 32, 36), 10: GgufType("q2_k", 256, 84), 11: GgufType("q3_k", 256, 110),
    12: GgufType("q4_k", 256, 144), 13: GgufType("q5_k", 256, 176), 14: GgufType("q6_k", 256, 210),
    15: GgufType("q8_k", 256, 292), 16: GgufType("iq2_xxs", 256, 66), 17: GgufType("iq2_xs", 256, 74),
    18: GgufType("iq3_xxs", 256, 98), 19: GgufType("iq1_s", 256, 50), 20: GgufType("iq4_nl", 32, 18),
    21: GgufType("iq3_s", 256, 110), 22: GgufType("iq2_s", 256, 82), 23: GgufType("iq4_xs", 256, 136),
    29: GgufType("iq1_m", 256, 56), 34: GgufType("tq1_0", 256, 54), 35: GgufType("tq2_0", 256, 66), 39: GgufType("mxfp4", 32, 17),
}  # fmt: skip
"""Number of a type in a file -> the type."""

_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_LONGEST_ARRAY = 64
"""Maximum number of items of an array that are kept unasked. A vocabulary has a hundred thousand."""

Value = int | float | bool | str | list[object]


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the header."""

    shape: Shape
    """Shape with the outermost axis first, as in torch."""
    dtype: str
    """torch's name of the dtype, or the name of the block type (`q8_0`)."""
    offset: int
    """Offset in the file."""
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    version: int
    keys: Mapping[str, Value]
    """Key -> value. Arrays of more than 64 items are left out unless they were asked for: see `lengths`."""
    lengths: Mapping[str, int]
    """Number of items of each array."""
    tensors: Mapping[str, GgufTensor]
    nbytes: int
    """Size of the file before the data of its tensors."""


def is_gguf(path: Path) -> bool:
    """True if a file begins with GGUF's magic bytes. Raises OSError."""
    with open_stream(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def read(path: Path, long: Collection[str] = ()) -> GgufHeader:
    """Read the header of a GGUF file. long: keys of arrays to keep, however many items they have.

    Raises CorruptCheckpoint for impossible values and for other versions.
    """
    try:
        with open_stream(path) as file:
            return _Reader(file, regular_size(path), long).header()
    except ValueError as error:
        raise CorruptCheckpoint(
            f"{path}: is not a valid GGUF file ({error}); copy it again"
        ) from error


class _Reader:
    """Reads a file forward, with bounds on everything that it reads."""

    def __init__(self, file: BinaryIO, size: int, long: Collection[str]) -> None:
        self._file, self._at, self._size, self._long = file, 0, size, long
        self._lengths: dict[str, int] = {}
        self._strings = 0

    def header(self) -> GgufHeader:
        if self._take(len(MAGIC)) != MAGIC:
            raise ValueError("it doesn't begin with GGUF")
        version = int(self._number("<I"))
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are read")
        tensors, keys = int(self._number("<Q")), int(self._number("<Q"))
        if max(tensors, keys) > GGUF_ENTRIES:
            raise ValueError(f"{tensors:,} tensors and {keys:,} keys, more than any model has")
        found: dict[str, Value] = {}
        names = set[str]()
        for _ in range(keys):
            name = _new(self._text(), names)
            value = self._value(int(self._number("<I")), name)
            if value is not None:
                found[name] = value
        listed = [self._tensor() for _ in range(tensors)]
        alignment = found.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & alignment - 1:
            raise ValueError(
                f"general.alignment is {alignment!r:.40}, which is no power of 2 from 8 on"
            )
        start = -(-self._at // alignment) * alignment
        return GgufHeader(
            version, found, self._lengths, self._placed(listed, start, alignment), start
        )

    def _placed(
        self, listed: list[tuple[str, Shape, GgufType, int]], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """The tensors with their places in the file, by name.

        llama.cpp requires that each tensor begins where the previous one ends, after padding, and that nothing follows
        the last one. Raises ValueError if this doesn't hold.
        """
        placed: dict[str, GgufTensor] = {}
        names, expected = set[str](), 0
        for name, shape, kind, offset in listed:
            nbytes = _stored_bytes(name, shape, kind)
            if offset != expected:
                raise ValueError(
                    f"{name} begins at {offset} of the data, and should begin at {expected}"
                )
            if start + offset + nbytes > self._size:
                raise ValueError(
                    f"{name} reaches past the end of the file, which has {self._size} bytes"
                )
            placed[_new(name, names)] = GgufTensor(shape, kind.name, start + offset, nbytes)
            expected = -(-(offset + nbytes) // alignment) * alignment
        if self._size > start + expected:
            raise ValueError(
                f"it has {self._size - start - expected:,} more bytes than its tensors"
            )
        return placed

    def _tensor(self) -> tuple[str, Shape, GgufType, int]:
        name = self._text()
        axes = int(self._number("<I"))
        if axes > AXES:
            raise ValueError(f"{name} has {axes} axes")
        sizes = [int(self._number("<Q")) for _ in range(axes)]
        if any(size >= AXIS for size in sizes):
            raise ValueError(f"{name} has sizes {sizes!r:.100}")
        number = int(self._number("<I"))
        offset = int(self._number("<Q"))
        if number not in TYPES:
            raise ValueError(f"{name} is of type {number}, which is not known")
        shape = tuple(reversed(sizes))
        return name, shape, TYPES[number], offset

    def _value(self, kind: int, name: str) -> Value | None:
        """Read a value; None for an array that is too long to be kept."""
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._scalar(kind)
        item = int(self._number("<I"))
        count = int(self._number("<Q"))
        self._lengths[name] = count
        if item == _ARRAY:
            raise ValueError(f"{name} is an array of arrays")
        if count > _LONGEST_ARRAY:
            if name not in self._long:
                self._skip(item, count)
                return None
            self._require_few(count)
        if item == _STRING:
            return [self._text() for _ in range(count)]
        return [self._scalar(item) for _ in range(count)]

    def _require_few(self, items: int) -> None:
        """Count items of arrays. Raises ValueError for more than any vocabulary has."""
        self._strings += items
        if self._strings > GGUF_STRINGS:
            raise ValueError(f"its arrays have {self._strings:,} words, more than any vocabulary")

    def _skip(self, item: int, count: int) -> None:
        if item != _STRING:
            self._skip_bytes(count * struct.calcsize(self._format(item)))
            return
        self._require_few(count)
        file, at, end = self._file, self._at, min(self._size, GGUF_HEADER_BYTES)
        for _ in range(count):  # may run a million times, so it calls no method
            at += 8 + int.from_bytes(file.read(8), "little")
            if at > end:
                break
            file.seek(at)
        self._advance(at - self._at)

    def _scalar(self, kind: int) -> int | float | bool:
        return self._number(self._format(kind))

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"a value is of type {kind}, which is not known")
        return _NUMBERS[kind]

    def _number(self, code: str) -> int | float | bool:
        (value,) = struct.unpack(code, self._take(struct.calcsize(code)))
        number: int | float | bool = value
        return number

    def _text(self) -> str:
        return self._take(int(self._number("<Q"))).decode("utf-8", "replace")

    def _take(self, count: int) -> bytes:
        self._advance(count)
        content = self._file.read(count)
        if len(content) != count:
            raise ValueError("it became shorter while it was read")
        return content

    def _skip_bytes(self, count: int) -> None:
        self._advance(count)
        self._file.seek(self._at)

    def _advance(self, count: int) -> None:
        if self._at + count > self._size:
            raise ValueError(f"it ends at byte {self._size}, in the middle of its header")
        if self._at + count > GGUF_HEADER_BYTES:
            raise ValueError(f"its header has more than {GGUF_HEADER_BYTES:,} bytes")
        self._at += count


def _new(name: str, names: set[str]) -> str:
    """Return a name after checking that it is new. Raises ValueError for a duplicate."""
    if name in names:
        raise ValueError(f"it has {name:.100} twice")
    names.add(name)
    return name


def _stored_bytes(name: str, shape: Shape, kind: GgufType) -> int:
    if shape and shape[-1] % kind.block:
        raise ValueError(
            f"{name} has rows of {shape[-1]} elements, {kind.name} blocks of {kind.block}"
        )
    return prod(shape) // kind.block * kind.nbytes
