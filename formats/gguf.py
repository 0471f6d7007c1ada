"""Writes GGUF, version 3, as llama.cpp reads it: one file of typed metadata, a table of tensors, and their data.

gguf_header.py reads such files.

    GGUF, u32 3, u64 tensors, u64 values
    values        string key, u32 type, the value; strings: u64 bytes, UTF-8; arrays: u32 type, u64 count, elements
    tensors       string name, u32 axes, u64 sizes (innermost first), u32 type, u64 offset in the data
    data          begins at a multiple of 32, and every tensor in it is padded to a multiple of 32

All numbers are little-endian. Quantized types store blocks of consecutive numbers of a row (`BLOCK_TYPES`). Source: ggml's
gguf.md.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from formats.output import Record
from formats.tensor import Shape

ALIGNMENT = 32
BLOCK_TYPES = {
    "q4_0": (32, 18),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
"""Quantized types that are written -> (numbers in a block, bytes of a block)."""
READ_TYPES = {
    **BLOCK_TYPES,
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
    "mxfp4": (32, 17),
}
"""Quantized types that are read, in the same form."""


class Kind(NamedTuple):
    """The storage type of a tensor's numbers."""

    number: int
    """The type's number in the table of tensors."""
    file_type: int
    """The value of general.file_type if most numbers of a file are stored in this type."""


KINDS = {
    "float32": Kind(0, 0), "float16": Kind(1, 1), "bfloat16": Kind(30, 32),
    "q4_0": Kind(2, 2), "q8_0": Kind(8, 7), "q4_k": Kind(12, 15), "q5_k": Kind(13, 17), "q6_k": Kind(14, 18),
}  # fmt: skip
_TYPES = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?")}
_STRING, _ARRAY = 8, 9


class Value(NamedTuple):
    """A value of the metadata: `u32`, `i32`, `f32`, `bool` or `string`. If the value is a list, it is an array of this
    type."""

    type: str
    value: Any


def stored_bytes(shape: Shape, kind: str) -> int:
    """Size of a tensor's data in bytes. Quantized types require rows of whole blocks."""
    if kind in BLOCK_TYPES:
        numbers, nbytes = BLOCK_TYPES[kind]
        return prod(shape) // numbers * nbytes
    return prod(shape) * {"float32": 4}.get(kind, 2)


class GgufLayout:
    """The layout of one file. Tensors are stored in the given order."""

    needs_checksums = False

    def __init__(
        self,
        values: Mapping[str, Value],
        tensors: Mapping[str, tuple[Shape, str]],
        constants: Mapping[str, bytes],
    ) -> None:
        """tensors: name -> (shape, kind). constants: name -> content of tensors that are not streamed."""
        head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values))]
        head += [_string(key) + _value(value) for key, value in values.items()]
        offset, spans = 0, {}
        for name, (shape, kind) in tensors.items():
            sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
            head.append(
                _string(name)
                + struct.pack("<I", len(shape))
                + sizes
                + struct.pack("<IQ", KINDS[kind].number, offset)
            )
            spans[name] = (offset, stored_bytes(shape, kind))
            offset += -(-spans[name][1] // ALIGNMENT) * ALIGNMENT
        start = -(-sum(map(len, head)) // ALIGNMENT) * ALIGNMENT
        self._head = b"".join(head).ljust(start, b"\0")
        self._constants = {start + spans[name][0]: content for name, content in constants.items()}
        self.description = b"".join((self._head, *self._constants.values()))
        """The bytes of the file without the streamed tensors: metadata, the table of tensors, and constants in their
        order."""
        self.size = start + offset
        self.records = {
            name: Record(start + begin, size)
            for name, (begin, size) in spans.items()
            if name not in constants
        }

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        yield 0, self._head
        yield from self._constants.items()


def _string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Value) -> bytes:
    if isinstance(value.value, Sequence) and not isinstance(value.value, str):
        elements = b"".join(_plain(value.type, element) for element in value.value)
        return struct.pack("<IIQ", _ARRAY, _number(value.type), len(value.value)) + elements
    return struct.pack("<I", _number(value.type)) + _plain(value.type, value.value)


def _number(kind: str) -> int:
    return _STRING if kind == "string" else _TYPES[kind][0]


def _plain(kind: str, value: Any) -> bytes:
    return _string(value) if kind == "string" else struct.pack(_TYPES[kind][1], value)
