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
"""The number of items of an array whose fields are changed."""


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
    # Half of the keys, so that tensors are chosen more often.
    some = [field for field in fields if random.random() < 0.5 or "tensor" in field.what]
    field = random.choice(some or fields)
    end = field.offset + field.nbytes
    bits = 8 * field.nbytes
    old = int.from_bytes(content[field.offset : end], "little")
    one_bit_changed = old ^ 1 << random.randrange(bits)
    values = [*HUGE, old + 1, old - 1, old * 2, old // 2, one_bit_changed]
    value = random.choice(values)
    new = (value % (1 << bits)).to_bytes(field.nbytes, "little")
    changed = content[: field.offset] + new + content[end:]
    return changed, f"{field.what}: {old} to {value}"


def _fields_of_gguf(content: bytes) -> Iterator[Field]:
    """Every number of the header, and the lengths and first bytes of its texts."""
    yield Field(4, 4, "version")
    yield Field(8, 8, "tensors")
    yield Field(16, 8, "keys")
    tensors, keys = struct.unpack_from("<QQ", content, 8)
    at = 24
    for _ in range(keys):
        fields = list(_fields_of_key(content, at))
        yield from fields[: 2 + _SHOWN_ITEMS]
        at = fields[-1].offset + fields[-1].nbytes
    for _ in range(tensors):
        fields = list(_fields_of_tensor(content, at))
        yield from fields
        at = fields[-1].offset + fields[-1].nbytes


def _fields_of_key(content: bytes, at: int) -> Iterator[Field]:
    """A name, the type of the value, and the value, which ends where the key does."""
    (length,) = struct.unpack_from("<Q", content, at)
    end = at + 8 + length
    name = content[at + 8 : end].decode()
    (kind,) = struct.unpack_from("<I", content, end)
    yield Field(at, 8, f"length of {name}")
    yield Field(end, 4, f"type of {name}")
    yield from _value(content, end + 4, kind, name)


def _fields_of_tensor(content: bytes, at: int) -> Iterator[Field]:
    """A name, the sizes, the type of the elements, and the offset, which ends where the tensor does."""
    (length,) = struct.unpack_from("<Q", content, at)
    end = at + 8 + length
    name = f"tensor {content[at + 8 : end].decode()}"
    (axes,) = struct.unpack_from("<I", content, end)
    sizes = end + 4
    yield Field(at, 8, f"length of {name}")
    yield Field(at + 8, 1, f"name of {name}")
    yield Field(end, 4, f"axes of {name}")
    for axis in range(axes):
        yield Field(sizes + 8 * axis, 8, f"size of {name}")
    kind = sizes + 8 * axes
    yield Field(kind, 4, f"type of {name}")
    yield Field(kind + 4, 8, f"offset of {name}")


def _value(content: bytes, at: int, kind: int, name: str) -> Iterator[Field]:
    """The last field ends where the value does."""
    if kind == _STRING:
        (length,) = struct.unpack_from("<Q", content, at)
        yield Field(at, 8, f"length of the text of {name}")
        yield Field(at + 8, length, f"text of {name}")
    elif kind == _ARRAY:
        item, count = struct.unpack_from("<IQ", content, at)
        yield Field(at, 4, f"items' type of {name}")
        yield Field(at + 4, 8, f"items of {name}")
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
    old = lines[place]
    key, _, value = old.partition(":")
    doubtful = (value + "0", value + ": x", "&a [*a, *a]", "!!python/object:os.system")
    new = random.choice([*STRANGE, *HUGE, *doubtful])
    other_value = f"{key}: {new}"
    no_colon = f"{key}{value}"
    indented = f"  {key}:{value}"
    twice = f"{key}:{value}\n{key}:{value}"
    lines[place] = random.choice([other_value, no_colon, indented, twice])
    changed = "\n".join(lines).encode("utf-8", "replace")
    return changed, f"line {place}: {lines[place][:60]!r}"
