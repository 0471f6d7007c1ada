"""One field changed of a file that other software wrote: of GGUF's header, of a tar archive's, of JSON without a suffix, of YAML."""

import struct
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from tests.trust.fuzz_inputs import tar_file
from tests.trust.strange_values import HUGE, STRANGE, mutate_json

_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of GGUF's numbers, by type."""
_SHOWN_ITEMS = 20
"""Of an array, whose fields are changed."""


class Field(NamedTuple):
    offset: int
    nbytes: int
    what: str


def changed_field(file: str, content: bytes, random: Random) -> tuple[bytes, str] | None:
    """(the changed content, what was changed); None for a file of another kind."""
    if content.startswith(b"GGUF"):
        return _changed_gguf(content, random)
    if content[257:262] == b"ustar":
        return tar_file([content], random), "a field of the archive"
    if content.lstrip()[:1] == b"{" and not file.endswith(".json"):
        return mutate_json(content, random)
    return _changed_yaml(content, random) if file.endswith(".yaml") else None


def _changed_gguf(content: bytes, random: Random) -> tuple[bytes, str]:
    fields = list(_fields_of_gguf(content))
    field = random.choice(
        [each for each in fields if random.random() < 0.5 or "tensor" in each.what] or fields
    )
    old = int.from_bytes(content[field.offset : field.offset + field.nbytes], "little")
    value = random.choice(
        [*HUGE, old + 1, old - 1, old * 2, old // 2, old ^ 1 << random.randrange(8 * field.nbytes)]
    )
    new = (value % (1 << 8 * field.nbytes)).to_bytes(field.nbytes, "little")
    return content[: field.offset] + new + content[
        field.offset + field.nbytes :
    ], f"{field.what}: {old} to {value}"


def _fields_of_gguf(content: bytes) -> Iterator[Field]:
    """Every number of the header, and the lengths and first bytes of its texts."""
    yield from (Field(4, 4, "version"), Field(8, 8, "tensors"), Field(16, 8, "keys"))
    tensors, keys = struct.unpack_from("<QQ", content, 8)
    at = 24
    for _ in range(keys):
        length = struct.unpack_from("<Q", content, at)[0]
        name = content[at + 8 : at + 8 + length].decode()
        yield Field(at, 8, f"length of {name}")
        at += 8 + length
        yield Field(at, 4, f"type of {name}")
        fields = list(_value(content, at + 4, struct.unpack_from("<I", content, at)[0], name))
        yield from fields[:_SHOWN_ITEMS]
        at = fields[-1].offset + fields[-1].nbytes
    for _ in range(tensors):
        length = struct.unpack_from("<Q", content, at)[0]
        name = f"tensor {content[at + 8 : at + 8 + length].decode()}"
        axes = struct.unpack_from("<I", content, at + 8 + length)[0]
        yield from (Field(at, 8, f"length of {name}"), Field(at + 8, 1, f"name of {name}"))
        at += 8 + length
        yield Field(at, 4, f"axes of {name}")
        yield from (Field(at + 4 + 8 * axis, 8, f"size of {name}") for axis in range(axes))
        at += 4 + 8 * axes
        yield from (Field(at, 4, f"type of {name}"), Field(at + 4, 8, f"offset of {name}"))
        at += 12


def _value(content: bytes, at: int, kind: int, name: str) -> Iterator[Field]:
    """The last field ends where the value does."""
    if kind == _STRING:
        length = struct.unpack_from("<Q", content, at)[0]
        yield Field(at, 8, f"length of the text of {name}")
        yield Field(at + 8, length, f"text of {name}")
    elif kind == _ARRAY:
        item, count = struct.unpack_from("<IQ", content, at)
        yield from (Field(at, 4, f"items' type of {name}"), Field(at + 4, 8, f"items of {name}"))
        at += 12
        for _ in range(count):
            fields = list(_value(content, at, item, f"an item of {name}"))
            yield from fields
            at = fields[-1].offset + fields[-1].nbytes
    else:
        yield Field(at, _SIZES[kind], f"value of {name}")


def _changed_yaml(content: bytes, random: Random) -> tuple[bytes, str]:
    lines = content.decode().splitlines()
    place = random.randrange(len(lines))
    key, _, value = lines[place].partition(":")
    new = str(
        random.choice(
            [
                *STRANGE,
                *HUGE,
                value + "0",
                value + ": x",
                "&a [*a, *a]",
                "!!python/object:os.system",
            ]
        )
    )
    lines[place] = random.choice(
        [f"{key}: {new}", f"{key}{value}", f"  {key}:{value}", f"{key}:{value}\n{key}:{value}"]
    )
    return "\n".join(lines).encode("utf-8", "replace"), f"line {place}: {lines[place][:60]!r}"
