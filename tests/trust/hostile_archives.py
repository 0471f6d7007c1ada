"""Zip archives that no torch wrote: bombs, entries that overlap or lead elsewhere, directories that contradict the members."""

import io
import stat
import struct
import zlib
from collections.abc import Callable
from random import Random
from zipfile import ZIP_BZIP2, ZIP_DEFLATED, ZIP_LZMA, ZipFile, ZipInfo

from tests.trust.bench import Bench
from tests.trust.hostile import judge
from tests.trust.torch_containers import CONTAINERS, members, stored

_ZIPS = [container for container in CONTAINERS if container.kind == "zip"]
_CENTRAL, _END = b"PK\1\2", b"PK\5\6"
_FIELDS = {
    "flags": (8, "<H"), "method": (10, "<H"), "crc": (16, "<I"), "packed": (20, "<I"), "unpacked": (24, "<I"), "name length": (28, "<H"),
    "extra length": (30, "<H"), "comment length": (32, "<H"), "disk": (34, "<H"), "attributes": (38, "<I"), "header offset": (42, "<I"),
}  # fmt: skip
"""The fields of an entry in the central directory: (offset, layout)."""
_LOCAL_FIELDS = {
    "flags": (6, "<H"), "method": (8, "<H"), "crc": (14, "<I"), "packed": (18, "<I"), "unpacked": (22, "<I"), "name length": (26, "<H"),
    "extra length": (28, "<H"),
}  # fmt: skip
_END_FIELDS = {
    "entries here": (8, "<H"),
    "entries": (10, "<H"),
    "directory size": (12, "<I"),
    "directory offset": (16, "<I"),
    "comment length": (20, "<H"),
}


def attack(bench: Bench, case: int) -> None:
    random = bench.random("hostile archives", case)
    container = _ZIPS[case % len(_ZIPS)]
    bench.fresh_folder()
    file = min(bench.copy(container.checkpoint).glob(container.pattern))
    change = random.choice(_CHANGES)
    content, text = change(file.read_bytes(), random)
    file.write_bytes(content)
    judge(bench, random, f"{container}: {text}")


def _field(content: bytes, random: Random) -> tuple[bytes, str]:
    """One field of one header has another value."""
    headers = [(_CENTRAL, _FIELDS), (b"PK\3\4", _LOCAL_FIELDS), (_END, _END_FIELDS)]
    signature, fields = random.choice(headers)
    places = [place for place in range(len(content)) if content.startswith(signature, place)]
    name, (offset, layout) = random.choice(list(fields.items()))
    start = random.choice(places) + offset
    size = struct.calcsize(layout)
    (old,) = struct.unpack_from(layout, content, start)
    top = (1 << 8 * size) - 1
    near_old = ((old + 1) & top, (old - 1) & top, old ^ 8, (old * 2) & top)
    new = random.choice([0, 1, top, top - 1, *near_old, 64])
    changed = content[:start] + struct.pack(layout, new) + content[start + size :]
    return changed, f"{name} {old} becomes {new}"


def _compressed(content: bytes, random: Random) -> tuple[bytes, str]:
    method = random.choice([ZIP_DEFLATED, ZIP_BZIP2, ZIP_LZMA])
    made = io.BytesIO()
    with ZipFile(made, "w", method) as archive:
        for name, data in members(content):
            archive.writestr(name, data)
    return made.getvalue(), f"compressed by method {method}"


def _bomb(content: bytes, random: Random) -> tuple[bytes, str]:
    """A pickle of a gigabyte of zeros, which takes a megabyte."""
    size = 1 << 30
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(1 << 6))
    packed += compressor.flush()
    entries = []
    pickle_name = ""
    for name, data in members(content):
        is_pickle = name.endswith("data.pkl")
        entries.append((name, packed if is_pickle else data))
        if is_pickle:
            pickle_name = name
    made = bytearray(stored(entries))
    header = made.index(_CENTRAL)
    while not made[header + 46 :].startswith(pickle_name.encode()):
        header = made.index(_CENTRAL, header + 1)
    method, _ = _FIELDS["method"]
    unpacked, _ = _FIELDS["unpacked"]
    struct.pack_into("<H", made, header + method, ZIP_DEFLATED)
    struct.pack_into("<I", made, header + unpacked, size)
    return bytes(made), "a bomb"


def _named(content: bytes, random: Random) -> tuple[bytes, str]:
    entries = members(content)
    root = entries[0][0].partition("/")[0]
    name = random.choice(
        [
            "/etc/passwd",
            "../outside/secret",
            f"{root}/../../x",
            f"{root}\\data\\9",
            "C:/x",
            f"{root}//data.pkl",
            f"{root}/./data.pkl",
            "",
            f"{root}/" + "a" * 60_000,
            f"{root}/\u202edata.pkl",
            f"{root}/data/0",
            f"{root}/data.pkl",
            "other/data.pkl",
            f"{root}/",
            f"{root}/\x1b[31m",
        ]
    )
    place = random.randrange(len(entries) + 1)
    return stored(
        [*entries[:place], (name, b"\x80\x02N."), *entries[place:]]
    ), f"a member called {name[:40]!r}"


def _link(content: bytes, random: Random) -> tuple[bytes, str]:
    made = io.BytesIO()
    with ZipFile(made, "w") as archive:
        for name, data in members(content):
            info = ZipInfo(name)
            if name.endswith("data.pkl"):
                info.external_attr, data = (stat.S_IFLNK | 0o777) << 16, b"/etc/passwd"
            archive.writestr(info, data)
    return made.getvalue(), "a link"


def _many(content: bytes, random: Random) -> tuple[bytes, str]:
    entries = members(content)
    count = random.choice([1000, 20_000])
    root = entries[0][0].partition("/")[0]
    return stored(
        [*entries, *((f"{root}/data/x{number}", b"") for number in range(count))]
    ), f"{count} members more"


def _same_place(content: bytes, random: Random) -> tuple[bytes, str]:
    """Two names for one member: its entry in the directory stands there twice, renamed."""
    made = bytearray(content)
    end = made.rindex(_END)
    first = made.index(_CENTRAL)
    name_length, extra_length, comment_length = struct.unpack_from("<3H", made, first + 28)
    entry_size = 46 + name_length + extra_length + comment_length
    entry = bytearray(made[first : first + entry_size])
    last_letter = 46 + name_length - 1
    entry[last_letter] ^= 1
    made[end:end] = entry
    end += entry_size
    (entries,) = struct.unpack_from("<H", made, end + 10)
    (size,) = struct.unpack_from("<I", made, end + 12)
    struct.pack_into("<HHI", made, end + 8, entries + 1, entries + 1, size + entry_size)
    return bytes(made), "two names for one member"


def _around(content: bytes, random: Random) -> tuple[bytes, str]:
    more = random.choice(
        [b"x" * 100, content, content[-22:], b"PK\5\6" + bytes(18), b"#!/bin/sh\n", b"\x80\x02N."]
    )
    return (
        (more + content, "something before it")
        if random.random() < 0.5
        else (content + more, "something behind it")
    )


def _cut(content: bytes, random: Random) -> tuple[bytes, str]:
    end = content.rindex(_END)
    size = random.choice([end, end + 10, len(content) - 1, random.randrange(len(content))])
    return content[:size], f"cut at {size}"


_CHANGES: list[Callable[[bytes, Random], tuple[bytes, str]]] = [
    _field, _field, _field, _field, _compressed, _bomb, _named, _named, _link, _many, _same_place, _around, _cut,
]  # fmt: skip
