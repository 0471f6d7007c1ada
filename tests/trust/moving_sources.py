"""Sources that change while they are read: in place, by another file of the same name, cut off, made longer.

The output is that of the source before, or that of the source after, or there is none; never a mixture.
"""

import os
import shutil
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from random import Random

from formats.tensor import Box, Bytes, FileTensor, StridedTensor
from tests.trust import server
from tests.trust.bench import Bench, command
from tests.trust.judging import ABSENT, Failure, check_conduct, check_nothing_left, state

_WAYS = ("in place", "replaced", "cut", "longer", "gone", "all replaced")
_SOURCES = (
    "hf",
    "bin",
    "core-bare",
    "torch_dist-bare",
    "zarr-bare",
    "dcp-bare",
    "meta-bare",
    "legacy-bare",
)


def attack(bench: Bench, case: int) -> None:
    random = bench.random("moving sources", case)
    name, way = _SOURCES[case % len(_SOURCES)], random.choice(_WAYS)
    other, reads = _other(bench, name), random.randrange(1, 22)
    before, after = _made(bench, name, None), _made(bench, name, other)
    folder = bench.fresh_folder()
    source = bench.copy(name)
    files = [
        path
        for path in sorted(source.rglob("*"))
        if path.is_file() and path.suffix not in (".json", ".txt")
    ]
    file = random.choice(files)
    what = f"{name}: {file.relative_to(source)} {way}, before read {reads}"

    def prepare() -> None:
        _at_read(reads, lambda: _change(source, other, file, way, random))

    options = random.choice(["", "--verify"])
    outcome = server.run(*_command(folder, options), folder=folder, prepare=prepare)
    check_conduct(outcome, what)
    found = state(folder / "out")
    if outcome.status and found != ABSENT:
        raise Failure("wrong", f"{what}: exit {outcome.status}, and an output")
    if not outcome.status and found not in (before, after):
        raise Failure(
            "wrong",
            f"{what}: exit 0, and the output is neither that of the old nor that of the new source",
        )
    check_nothing_left(folder, ("out", "source"), what)


def _command(folder: Path, options: str = "") -> list[object]:
    return command(folder / "source", folder / "out", "--saver hf", options)


@cache
def _other(bench: Bench, name: str) -> Path:
    """A checkpoint of the same format and sizes, with other weights."""
    place = bench.root / f"moved-{bench.worker}-{name}"
    shutil.copytree(bench.checkpoints[name].path, place)
    for file in place.rglob("*"):
        if file.is_file() and file.suffix in (".safetensors", "") and file.name != ".metadata":
            content = bytearray(file.read_bytes())
            content[-8:] = bytes(8)
            file.write_bytes(content)
    return place


@cache
def _made(bench: Bench, name: str, other: Path | None) -> Mapping[str, str]:
    """The output of a conversion of one of the two sources; ABSENT if it fails."""
    folder = bench.fresh_folder()
    shutil.copytree(other or bench.checkpoints[name].path, folder / "source")
    server.run(*_command(folder), folder=folder)
    return state(folder / "out")


def _at_read(number: int, change: object) -> None:
    """Call it in the fork, before the tensor of this number is read."""
    reads = count(1)
    for kind in (FileTensor, StridedTensor):
        read_into = kind.read_into

        def counted(self: FileTensor, box: Box, out: Bytes, read_into: object = read_into) -> None:
            if next(reads) == number:
                change()  # type: ignore[operator]
            read_into(self, box, out)  # type: ignore[operator]

        kind.read_into = counted  # type: ignore[method-assign, assignment]


def _change(source: Path, other: Path, file: Path, way: str, random: Random) -> None:
    content = file.read_bytes()
    if way == "in place":
        with file.open("r+b") as opened:
            opened.seek(len(content) // 2)
            opened.write(bytes(byte ^ 1 for byte in content[len(content) // 2 :]))
    elif way == "replaced":
        new = file.with_name("new")
        new.write_bytes(bytes(byte ^ 1 for byte in content))
        new.rename(file)
    elif way == "cut":
        os.truncate(file, len(content) // 2)
    elif way == "longer":
        with file.open("ab") as opened:
            opened.write(b"more")
    elif way == "gone":
        file.unlink()
    else:
        shutil.rmtree(source)
        shutil.copytree(other, source)
