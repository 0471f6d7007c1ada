"""A tokenizer.model of SentencePiece, read and written.

It is a protobuf message. Its repeated field 1 is a piece: 1 text, 2 score (a float), 3 kind (GGUF has the same numbers).
Field 2 says how it was trained, field 3 how text is normalized.
Source: sentencepiece_model.proto.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces."""
BPE = 2
"""The kind of model that llama.cpp computes. The others are unigram (1), whole words and characters."""
_IDS = {"unknown": 40, "bos": 41, "eos": 42, "padding": 43}
"""Special piece -> the field with its number."""


class Piece(NamedTuple):
    """A token of a tokenizer.model."""

    text: str
    score: float
    kind: int


class Rules(NamedTuple):
    """The way in which a tokenizer.model splits text."""

    is_bpe: bool
    """True for the kind that llama.cpp computes, also if the file doesn't name its kind."""
    space_first: bool
    """True if a space is put before a text."""


def read_rules(content: bytes) -> Rules:
    """The rules of a tokenizer.model. Raises ValueError or IndexError if it isn't one."""
    trained, normalized = (_message(content, number) for number in (2, 3))
    return Rules(trained.get(3, BPE) == BPE, bool(normalized.get(3, True)))


def _message(content: bytes, number: int) -> dict[int, int | bytes]:
    """The fields of the message in a field; none if it is missing."""
    found = dict(_fields(content)).get(number, b"")
    return dict(_fields(found)) if isinstance(found, bytes) else {}


def read_pieces(content: bytes) -> list[Piece]:
    """The pieces of a tokenizer.model, in order. Raises ValueError or IndexError if it isn't one."""
    return [
        _piece(value)
        for number, value in _fields(content)
        if number == 1 and isinstance(value, bytes)
    ]


def _piece(content: bytes) -> Piece:
    fields = dict(_fields(content))
    text, score = fields.get(1, b""), fields.get(2, bytes(4))
    assert isinstance(text, bytes)
    assert isinstance(score, bytes)
    (number,) = struct.unpack("<f", score)
    kind = fields.get(3, NORMAL)
    return Piece(text.decode(), number, int(kind) if isinstance(kind, int) else NORMAL)


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a protobuf message. Raises ValueError or IndexError if it isn't one."""
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        number = tag >> 3
        wire = tag & 7
        if wire == 0:
            value, at = _varint(content, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(content, at)
        if size is None or at + size > len(content):
            raise ValueError("not a protobuf message")
        end = at + size
        yield number, content[at:end]
        at = end


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128 or shift > 63:
            return value, at


def model_of(
    pieces: Iterable[Piece], ids: Mapping[str, int | None], *, space_first: bool, fewer_spaces: bool
) -> bytes:
    """The content of a tokenizer.model.

    ids: numbers of the special pieces `unknown`, `bos`, `eos` and `padding`, if they exist. space_first: put a space before
    a text. fewer_spaces: make one space of several.
    """
    listed = tuple(pieces)
    has_bytes = any(piece.kind == BYTE for piece in listed)
    trained = _number(3, BPE) + _number(4, len(listed)) + _number(35, has_bytes)
    for word, field in _IDS.items():
        number = ids.get(word)
        trained += _number(field, -1 if number is None else number)
    normalized = (
        _field(1, b"identity")
        + _number(3, space_first)
        + _number(4, fewer_spaces)
        + _number(5, True)  # spaces are written as a visible character
    )
    return b"".join((*map(_written, listed), _field(2, trained), _field(3, normalized)))


def _written(piece: Piece) -> bytes:
    text = _field(1, piece.text.encode(errors="replace"))
    return _field(1, text + _float(2, piece.score) + _number(3, piece.kind))


def _field(number: int, content: bytes) -> bytes:
    return _as_varint(number << 3 | 2) + _as_varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    """A field with an integer. A negative one has ten bytes."""
    return _as_varint(number << 3) + _as_varint(value % (1 << 64))


def _float(number: int, value: float) -> bytes:
    return _as_varint(number << 3 | 5) + struct.pack("<f", value)


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
