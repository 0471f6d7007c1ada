"""Damaged and hostile patches: `apply` refuses them in one line, or makes the newer checkpoint as from the intact patch.

Half of the cases damage the bytes of a file. The others change what a patch says, with hashes that fit: sizes, shapes,
forms of blocks, names of files, gadgets in its pickle, blocks that decompress to far more than they should.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import zstandard
from blake3 import blake3

from formats import torch_zip
from megaconv.patches.patch import BLOCKS, HEADER, INDEX
from tests.trust import server
from tests.trust.bench import Bench
from tests.trust.gadgets import MARK
from tests.trust.hostile import SECRET
from tests.trust.hostile_pickles import MAKERS
from tests.trust.judging import (
    ABSENT,
    Failure,
    check_conduct,
    check_nothing_left,
    check_one_of,
    state,
)
from tests.trust.mutations import damage_a_file
from tests.trust.strange_values import mutate_json
from tests.trust.torch_containers import Container, replace_pickle

_BOMB_BYTES = 1 << 30


def attack(bench: Bench, number: int) -> None:
    random = bench.random("patches", number)
    intact = bench.output("hf", "apply")
    folder = bench.fresh_folder()
    patch = Path(shutil.copytree(bench.output("hf", "delta").path, folder / "source"))
    if number % 2:
        what = str(damage_a_file(patch, random))
    else:
        make = random.choice(_HOSTILE)
        what = f"{make.__name__} {make(patch, random)}"
    _judge(bench, folder, patch, f"patch: {what}", intact.files)


def _judge(bench: Bench, folder: Path, patch: Path, what: str, intact: Mapping[str, str]) -> None:
    outside = bench.root / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "secret").write_text(SECRET)
    words = ["apply", bench.checkpoints["hf"].path, patch, "--save-dir", folder / "out"]
    outcome = server.run(*words, "--workers", 1, folder=folder, outside=outside)
    check_conduct(outcome, what)
    if (folder / MARK).exists():
        raise Failure("executed", what)
    if outcome.status:
        check_one_of(folder / "out", (ABSENT,), what)
        check_nothing_left(folder, ("source", "out"), what)
        errors = [line for line in outcome.err.splitlines() if line.startswith("megaconv: error")]
        if len(errors) != 1:
            raise Failure("message", f"{what}: not one line: {outcome.err!r:.400}")
        return
    found = state(folder / "out")
    differing = [name for name in {*found, *intact} if found.get(name) != intact.get(name)]
    weights = [name for name in differing if name.endswith(".safetensors")]
    if weights:
        raise Failure("wrong", f"{what}: exit 0, and {', '.join(weights)} differ")
    if any(SECRET.encode() in path.read_bytes() for path in (folder / "out").rglob("*.json")):
        raise Failure("outside", f"{what}: the output holds what lies outside")


# Hostile contents. Each changes a patch and says what it did.


def _index(patch: Path) -> Any:
    return json.loads((patch / INDEX).read_bytes())


def _write(patch: Path, index: Any) -> None:
    (patch / INDEX).write_text(json.dumps(index))


def _tensor(index: Any, random: Random) -> list[Any]:
    found: list[Any] = random.choice(index["tensors"])
    return found


def sizes(patch: Path, random: Random) -> str:
    index = _index(patch)
    entry = _tensor(index, random)
    entry[5] = [random.choice([0, -1, 1, 2**31, 2**63, 10**30, 1.5, "1", None, [1], True])]
    _write(patch, index)
    return f"{entry[0]} {entry[5]}"


def shape(patch: Path, random: Random) -> str:
    index = _index(patch)
    entry = _tensor(index, random)
    entry[3] = random.choice(
        [[], [0], [-1, 4], [2**40, 2**40], [10**30], [1.5], entry[3][::-1], [1] * 200]
    )
    _write(patch, index)
    return f"{entry[0]} {entry[3]!r:.60}"


def dtype(patch: Path, random: Random) -> str:
    index = _index(patch)
    entry = _tensor(index, random)
    entry[2] = random.choice(["float128", "", "int4", "object", "float32", None, 3, "../x"])
    _write(patch, index)
    return f"{entry[0]} {entry[2]}"


def names(patch: Path, random: Random) -> str:
    """Give a tensor another name or slot."""
    index = _index(patch)
    entry, place = _tensor(index, random), random.randrange(2)
    entry[place] = random.choice(
        ["../../x", "", "a" * 10**6, "\x1b[2J", 7, None, index["tensors"][0][0]]
    )
    _write(patch, index)
    return f"{place} {entry[place]!r:.40}"


def tensors_moved(patch: Path, random: Random) -> str:
    index = _index(patch)
    listed = index["tensors"]
    kind = random.choice(["gone", "doubled", "exchanged", "none"])
    place, other = random.randrange(len(listed)), random.randrange(len(listed))
    if kind == "gone":
        del listed[place]
    elif kind == "doubled":
        listed.append(listed[place])
    elif kind == "exchanged":
        listed[place], listed[other] = listed[other], listed[place]
    else:
        index["tensors"] = []
    _write(patch, index)
    return f"{kind} {place} {other}"


def ends(patch: Path, random: Random) -> str:
    """Record another fingerprint of the base or of the newer checkpoint."""
    index = _index(patch)
    side, what = random.choice(["base", "new"]), random.choice(["weights", "optimizer"])
    index[side][what] = random.choice([None, "0" * 64, 5, index["new"]["weights"], {}])
    _write(patch, index)
    return f"{side} {what} {index[side][what]!r:.20}"


def json_value(patch: Path, random: Random) -> str:
    content, text = mutate_json((patch / INDEX).read_bytes(), random)
    (patch / INDEX).write_bytes(content)
    return text


def huge_json(patch: Path, random: Random) -> str:
    content = random.choice(
        [b"[" * 10**6, b'{"format": ' * 10**5, b"1" * 10**7, b"[" + b"1," * 10**6 + b"1]"]
    )
    (patch / INDEX).write_bytes(content)
    return "nested or long"


def block(patch: Path, random: Random) -> str:
    """One block is another, and its hash fits."""
    index = _index(patch)
    place = random.randrange(len(index["tensors"]))
    entry = index["tensors"][place]
    kind, made = random.choice(_BLOCKS)
    start = sum(sum(each[5]) for each in index["tensors"][:place])
    end = start + sum(entry[5])
    whole = (patch / BLOCKS).read_bytes()
    blocks = made + whole[start + entry[5][0] : end]
    entry[5][0] = len(made)
    entry[6] = blake3(blocks).hexdigest()
    (patch / BLOCKS).write_bytes(whole[:start] + blocks + whole[end:])
    _write(patch, index)
    return f"{entry[0]}: {kind}"


def _compressed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(content)


_BLOCKS: list[tuple[str, bytes]] = [
    ("an unknown form", b"\x07abc"),
    ("same, with content", b"\x00abc"),
    ("xor without content", b"\x01"),
    ("xor of garbage", b"\x01garbage"),
    ("whole, and too short", b"\x03" + _compressed(b"ab")),
    ("a bomb", b"\x01" + _compressed(bytes(_BOMB_BYTES))),
    ("a sparse bomb", b"\x02" + struct.pack("<I", 2**32 - 1) + _compressed(bytes(1 << 20))),
    ("sparse and none", b"\x02" + struct.pack("<I", 0) + _compressed(b"")),
    ("sparse behind the end", b"\x02" + struct.pack("<I", 1) + _compressed(b"\xff" * 6)),
    ("sparse without count", b"\x02\x01"),
]


def header(patch: Path, random: Random) -> str:
    """Another header.pt, as torch writes it."""
    saved: Any = torch_zip.read(patch / HEADER)
    kind = random.choice(["files", "layers", "config", "training", "empty", "deep"])
    if kind == "files":
        saved["files"] = [
            random.choice(["../../../outside/secret", "/etc/passwd", "..", "", 5, "a/../../b"])
        ]
    elif kind == "layers":
        saved["config"]["layers"] = random.choice([10**9, -1, "many", None])
    elif kind == "config":
        name = random.choice(list(saved["config"]))
        saved["config"][name] = random.choice([10**30, -1, "x", None, [], {"a": 1}])
        kind += f" {name}"
    elif kind == "training":
        name = random.choice(list(saved["training"]))
        saved["training"][name] = random.choice([10**30, -1, "x", None, [], {"a": 1}])
        kind += f" {name}"
    elif kind == "empty":
        saved = random.choice([{}, [], None, 5])
    else:
        saved["source"] = {"x": saved["config"]}
    layout = torch_zip.plan(saved, "header")
    content = bytearray(layout.size)
    for offset, data in layout.headers({}):
        content[offset : offset + len(data)] = data
    (patch / HEADER).write_bytes(content)
    return kind


def pickle(patch: Path, random: Random) -> str:
    """A hostile pickle in header.pt."""
    make, text = random.choice(MAKERS)
    said: list[str] = []

    def change(old: bytes) -> bytes:
        new, what = make(old, random)
        said.append(what)
        return new

    replace_pickle(patch, Container("", HEADER, "zip"), change)
    return f"{text} {' '.join(said)}"


def link(patch: Path, random: Random) -> str:
    """A file of the patch is a pipe, a directory, or a link to what lies outside."""
    name = random.choice([INDEX, BLOCKS, HEADER])
    (patch / name).unlink()
    kind = random.choice(["pipe", "directory", "link"])
    if kind == "pipe":
        os.mkfifo(patch / name)
    elif kind == "directory":
        (patch / name).mkdir()
    else:
        (patch / name).symlink_to("/dev/zero")
    return f"{name} {kind}"


_HOSTILE: list[Callable[[Path, Random], str]] = [
    sizes, shape, dtype, names, tensors_moved, ends, json_value, json_value, huge_json, block, block, block, header, header,
    pickle, pickle, link,
]  # fmt: skip
