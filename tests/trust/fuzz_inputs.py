"""Makes inputs for fuzzing: real ones, changed where their structure has its joints."""

import json
import pickletools
import struct
from collections.abc import Sequence
from functools import lru_cache
from random import Random

from tests.trust.gadgets import gadget, monster, number, soup, value
from tests.trust.strange_values import HUGE, mutate_json
from tests.trust.torch_containers import members, stored

_INTERESTING = [
    n & (1 << 64) - 1
    for n in (
        0,
        1,
        0x7F,
        0x80,
        0xFF,
        0x7FFF,
        0xFFFF,
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**63 - 1,
        2**63,
        -1,
    )
]


def any_bytes(seeds: Sequence[bytes], random: Random) -> bytes:
    """A few changes of bytes, whatever they mean."""
    content = bytearray(random.choice(seeds))
    for _ in range(random.choice([1, 1, 2, 4, 8])):
        start, size = random.randrange(len(content) + 1), random.choice([1, 2, 4, 8, 16, 64])
        action = random.randrange(7)
        if action == 0 and content:
            content[min(start, len(content) - 1)] ^= 1 << random.randrange(8)
        elif action == 1:
            content[start : start + size] = b""
        elif action == 2:
            content[start:start] = random.randbytes(size)
        elif action == 3:
            content[start:start] = content[start : start + size]
        elif action == 4:
            width = random.choice([1, 2, 4, 8])
            new = random.choice(_INTERESTING) & (1 << 8 * width) - 1
            content[start : start + width] = new.to_bytes(width, random.choice(["little", "big"]))  # type: ignore[arg-type]
        elif action == 5:
            other = random.choice(seeds)
            place = random.randrange(len(other) + 1)
            content[start : start + size] = other[place : place + size]
        elif random.random() < 0.3:
            del content[start:]
    return bytes(content)


def json_text(seeds: Sequence[bytes], random: Random) -> bytes:
    if random.random() < 0.25:
        return any_bytes(seeds, random)
    content = random.choice(seeds)
    for _ in range(random.choice([1, 1, 2, 3])):
        content = mutate_json(content, random)[0]
    return content


def safetensors_file(seeds: Sequence[bytes], random: Random) -> bytes:
    """Another header, of the length that it says, before the same data."""
    if random.random() < 0.3:
        return any_bytes(seeds, random)
    content = random.choice(seeds)
    length = struct.unpack("<Q", content[:8])[0]
    header = mutate_json(content[8 : 8 + length], random)[0]
    if random.random() < 0.2:
        document = json.loads(content[8 : 8 + length])
        entry = random.choice(list(document.values()))
        if "data_offsets" in entry:
            entry[random.choice(["shape", "data_offsets"])] = [
                random.choice(HUGE),
                random.choice(HUGE),
            ]
        header = json.dumps(document).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def header_bytes(seeds: Sequence[bytes], random: Random) -> bytes:
    """A few changes of the first bytes, what follows as it was."""
    content, size = random.choice(seeds), random.choice([64, 512, 2048, 4096])
    return any_bytes([content[:size]], random) + content[size:]


def tar_file(seeds: Sequence[bytes], random: Random) -> bytes:
    """Changed blocks, of which those that are headers have a checksum that is right."""
    content = bytearray(any_bytes(seeds, random))
    for start in range(0, len(content) - 511, 512):
        if content[start + 257 : start + 262] == b"ustar" and random.random() < 0.9:
            if random.random() < 0.4:
                place, new = random.choice(_TAR_FIELDS)
                content[start + place : start + place + len(new)] = new
            content[start + 148 : start + 156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(content[start : start + 512])
    return bytes(content)


_TAR_FIELDS = [
    *(
        (124, size)
        for size in (
            b"-0000001000\0",
            b"0o000000010\0",
            b"77777777777\0",
            b"\x80" + b"\xff" * 11,
            b"\xff" * 12,
            b" " * 12,
        )
    ),
    *((156, kind) for kind in (b"0", b"\0", b"1", b"2", b"5", b"L", b"x", b"g", b"S", b"7")),
    *((0, name) for name in (b"../x\0", b"/x\0", b"\xff\0", b"\0", b"a\\b\0")),
]
"""(where in a header, what may lie there)."""


def torch_file(seeds: Sequence[bytes], random: Random) -> bytes:
    """Another pickle, or other records, in an archive that is in order."""
    if random.random() < 0.3:
        return any_bytes(seeds, random)
    entries = [*_members(random.choice(seeds))]
    if random.random() < 0.8:
        entries = [
            (name, _changed_pickle(data, random) if name.endswith("data.pkl") else data)
            for name, data in entries
        ]
    else:
        place = random.randrange(len(entries))
        name, data = entries.pop(place)
        if random.random() < 0.6:
            entries.insert(
                place,
                random.choice(
                    [(name + "x", data), (name, data[:-1]), (name.upper(), data), (name, data * 2)]
                ),
            )
    return stored(entries)


def pickle(seeds: Sequence[bytes], random: Random) -> bytes:
    """Instructions gone, doubled, exchanged, changed, or put between."""
    action = random.random()
    if action < 0.15:
        return any_bytes(seeds, random)
    if action < 0.25:
        return b"\x80\x02" + random.choice([soup, soup, gadget])(random)[0] + b"."
    return _changed_pickle(random.choice(seeds), random)


def _changed_pickle(content: bytes, random: Random) -> bytes:
    parts = [*_instructions(content)]
    for _ in range(random.choice([1, 1, 2, 4])):
        place, other = random.randrange(len(parts)), random.randrange(len(parts))
        action = random.randrange(8)
        if action == 0:
            parts[place] = b""
        elif action == 1:
            parts[place] *= random.choice([2, 3, 100])
        elif action == 2:
            parts[place], parts[other] = parts[other], parts[place]
        elif action == 3:
            parts[place] = number(random.choice(HUGE))
        elif action == 4:
            parts[place] = value(
                random.choice(["x", b"", 5, (), [], {}, (1, (2, 3)), "../x", True])
            )
        elif action == 5:
            parts[place] += gadget(random)[0]
        elif action == 6:
            parts[place] += (
                soup(random)[0] if random.random() < 0.9 else monster(random, (100, 2000))[0]
            )
        else:
            parts[place] = parts[other]
    return b"".join(parts)


@lru_cache(maxsize=64)
def _instructions(content: bytes) -> tuple[bytes, ...]:
    places = [position for _, _, position in pickletools.genops(content)]
    return tuple(
        content[start:end] for start, end in zip(places, [*places[1:], len(content)], strict=True)
    )


@lru_cache(maxsize=64)
def _members(content: bytes) -> tuple[tuple[str, bytes], ...]:
    return tuple(members(content))
