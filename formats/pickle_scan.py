"""Every name that the pickles of a file ask for, judged; nothing is made of them, and nothing is called.

What is looked into: torch files of any age, `.distcp` files by their `.metadata`, plain pickles, one after another.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from os import fdopen
from pathlib import Path

from formats import torch_legacy
from formats.ceilings import PICKLE_BYTES
from formats.pickle_globals import MalformedError, UnsafeCallError, called_by, is_ordinary
from formats.pickle_machine import Machine
from formats.pickle_records import Global, Opaque
from formats.pickle_run import run
from formats.regular_files import open_regular, regular_size
from formats.stored_zip import read_directory
from formats.tensor import InputFile

ZIP = b"PK\3\4"
ORDINARY, NAMED, UNSAFE = "ordinary", "named", "unsafe"
"""What checkpoints are made of; anything else that is named only; anything else that is called."""

_PROTOCOLS = tuple(bytes([0x80, number]) for number in range(2, 6))
_ARGUMENTS = {("numpy", "ndarray"), ("torch", "Tensor")}
"""What functions that rebuild arrays and tensors are given."""
_PICKLES_OF_LEGACY = 5
"""Magic number, protocol, machine, object, names of storages."""


@dataclass(frozen=True)
class Pickle:
    """One pickle and what it asks for."""

    place: str
    """The entry of an archive, or the byte that it starts at."""
    names: dict[str, str]
    """`torch._utils._rebuild_tensor_v2` -> ORDINARY, NAMED or UNSAFE."""
    fault: str = ""
    """Why it could not be followed to its end."""
    end: int = 0


@dataclass
class _Seen:
    names: dict[str, Global] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)


class _Scanner(Machine):
    """A machine that makes a record of every call, whatever is called."""

    by_columns = False

    def __init__(self, data: bytes | mmap, offset: int) -> None:
        super().__init__(data, offset, lambda identity: None, lambda record: record)
        self.seen = _Seen()

    def resolve(self, module: str, name: str) -> object:
        found = super().resolve(module, name)
        if type(found) is Global:
            self.seen.names[f"{found.module}.{found.name}"] = found
        return found

    def call(self, function: object, args: object) -> None:
        if not isinstance(function, Global | Opaque) or not isinstance(args, tuple):
            raise MalformedError("a call of something that is not a function")
        self.count_copies(args)
        self.make()
        if isinstance(function, Global):
            self.seen.called.update(f"{each.module}.{each.name}" for each in called_by(function, args))
        self.stack.append(Opaque(function.module, function.name, ()))

    def build(self, target: object, state: object) -> None:
        self.count_copies((state,))
        if isinstance(target, Global):  # which changes the class or function itself
            self.seen.called.add(f"{target.module}.{target.name}")


def scan_pickle(data: bytes | mmap, offset: int = 0, place: str = "") -> Pickle:
    """The pickle that starts at offset."""
    scanner, fault = _Scanner(data, offset), ""
    try:
        run(scanner)
    except UnsafeCallError as error:
        return Pickle(place, {**_judged(scanner.seen), "(pickle extension)": UNSAFE}, str(error), scanner.position)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, struct.error) as error:
        fault = f"a broken pickle near byte {scanner.position}: {error!s:.200}"
    return Pickle(place, _judged(scanner.seen), fault, scanner.position)


def _judged(seen: _Seen) -> dict[str, str]:
    return {name: _judge(found, called=name in seen.called) for name, found in sorted(seen.names.items())}


def _judge(found: Global, *, called: bool) -> str:
    if is_ordinary(found.module, found.name) or (not called and (found.module, found.name) in _ARGUMENTS):
        return ORDINARY
    return UNSAFE if called else NAMED


def scan_file(path: Path, ranges: list[tuple[int, int]] | None = None) -> Iterator[Pickle]:
    """All pickles of a file; none where it is of another kind. ranges: (offset, bytes) of the files in a `.distcp` file or a tar archive.

    Raises CorruptCheckpoint for an archive whose directory can't be true, and for what isn't a regular file.
    """
    if not regular_size(path):
        return
    if ranges is not None:
        file = InputFile.open(path)
        for start, nbytes in ranges:
            head = file.read(start, min(nbytes, 4))
            if head == ZIP:
                yield from _of_archive(file, start, nbytes)
            elif head[:2] in _PROTOCOLS:
                yield from _in_a_row(file.read(start, min(nbytes, PICKLE_BYTES)))
        file.close()
        return
    with fdopen(open_regular(path), "rb") as stream, mmap(stream.fileno(), 0, access=ACCESS_READ) as data:
        if data[:4] == ZIP:
            file = InputFile.open(path)
            yield from _of_archive(file, 0, file.size)
            file.close()
        elif data[:2] in _PROTOCOLS:
            yield from _in_a_row(data)


def _of_archive(file: InputFile, start: int, nbytes: int) -> Iterator[Pickle]:
    for name, entry in read_directory(file, start, nbytes).items():
        head = file.read(entry.offset, min(entry.nbytes, 2))
        if name.endswith((".pkl", ".pickle")):
            yield scan_pickle(file.read(entry.offset, entry.nbytes), 0, f"{name} at byte {entry.offset}")
        elif head in _PROTOCOLS and "/data/" not in name:
            yield scan_pickle(file.read(entry.offset, entry.nbytes), 0, name)


def _in_a_row(data: mmap | bytes) -> Iterator[Pickle]:
    legacy = data[: len(torch_legacy.MAGIC)] == torch_legacy.MAGIC
    offset = number = 0
    while offset < len(data) and data[offset : offset + 2] in _PROTOCOLS:
        found = scan_pickle(data, offset, f"byte {offset}")
        yield found
        number += 1
        if found.fault or found.end <= offset or (legacy and number == _PICKLES_OF_LEGACY):
            return
        offset = found.end
