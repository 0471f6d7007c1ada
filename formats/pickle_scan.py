"""Judges every name that the pickles of a file ask for. Nothing is made of the names, and nothing is called.

The scan covers torch files of any age, `.distcp` files by their `.metadata`, and sequences of plain pickles of every
protocol. It also covers numpy's arrays of Python objects, and zip archives of all these, compressed ones included.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from os import fdopen
from pathlib import Path
from zipfile import BadZipFile, ZipFile, ZipInfo

from formats import torch_legacy
from formats.ceilings import PICKLE_BYTES
from formats.errors import CheckpointError, CorruptCheckpoint
from formats.pickle_errors import MalformedError, UnsafeCallError
from formats.pickle_globals import called_by, is_ordinary, member
from formats.pickle_machine import Machine
from formats.pickle_records import Global, Opaque
from formats.pickle_run import run
from formats.regular_files import open_regular, regular_size
from formats.stored_zip import read_directory
from formats.streams import range_of
from formats.tensor import InputFile

ZIP = b"PK\3\4"
NUMPY = b"\x93NUMPY"
ORDINARY, NAMED, UNSAFE = "ordinary", "named", "unsafe"
"""ORDINARY: a name that checkpoints use. NAMED: another name that is only named. UNSAFE: another name that is called.
"""

_PROTOCOLS = tuple(bytes([0x80, number]) for number in range(2, 6))
"""The first bytes of pickles. Pickles of protocols 0 and 1, which every reader accepts as well, have no such mark."""
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ARGUMENTS = {("numpy", "ndarray"), ("torch", "Tensor")}
"""Names that functions get as arguments to rebuild arrays and tensors."""
_PICKLES_OF_LEGACY = 5
"""Pickles of a legacy torch file: magic number, protocol, machine, object, names of storages."""
_MOST_IN_A_ROW = 100_000
"""Maximum number of pickles in a sequence. No checkpoint has as many, and each takes some microseconds."""


@dataclass(frozen=True)
class Pickle:
    """One pickle, and the names that it asks for."""

    place: str
    """The entry of an archive, or the byte at which the pickle starts."""
    names: dict[str, str]
    """Name -> verdict: `torch._utils._rebuild_tensor_v2` -> ORDINARY, NAMED or UNSAFE."""
    fault: str = ""
    """The reason why the pickle could not be followed to its end; empty if it could."""
    end: int = 0


@dataclass
class _Seen:
    names: dict[str, Global] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)


class _Scanner(Machine):
    """A machine that records every call, of any function, and carries out none."""

    by_columns = False

    def __init__(self, data: bytes | mmap, offset: int) -> None:
        super().__init__(data, offset, _class_of, lambda record: record)
        self.seen = _Seen()

    def resolve(self, module: str, name: str) -> object:
        found = super().resolve(module, name)
        if type(found) is Global:
            self._note(found)
        return found

    def _note(self, found: Global) -> None:
        self.seen.names[f"{found.module}.{found.name}"] = found

    def call(self, function: object, args: object) -> None:
        if not isinstance(function, Global | Opaque) or not isinstance(args, tuple):
            raise MalformedError("a call of something that is not a function")
        self.count_copies(args)
        self.make()
        if isinstance(function, Global):
            found = member(function, args)
            if type(found) is Global:
                self._note(found)
                self.stack.append(found)
                return
            self.seen.called.update(
                f"{each.module}.{each.name}" for each in called_by(function, args)
            )
        self.stack.append(Opaque(function.module, function.name, ()))

    def build(self, target: object, state: object) -> None:
        self.count_copies((state,))
        if isinstance(target, Global):  # this changes the class or function itself
            self.seen.called.add(f"{target.module}.{target.name}")


def _class_of(identity: object) -> object:
    """The class of a module in a legacy torch file; None for a storage."""
    return identity[1] if torch_legacy.is_module(identity) else None


def scan_pickle(data: bytes | mmap, offset: int = 0, place: str = "") -> Pickle:
    """Scan the pickle that starts at offset."""
    scanner, fault = _Scanner(data, offset), ""
    try:
        run(scanner)
    except UnsafeCallError as error:
        return Pickle(
            place,
            {**_judged(scanner.seen), "(pickle extension)": UNSAFE},
            str(error),
            scanner.position,
        )
    except (
        ArithmeticError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        fault = f"a broken pickle near byte {scanner.position}: {error!s:.200}"
    return Pickle(place, _judged(scanner.seen), fault, scanner.position)


def _judged(seen: _Seen) -> dict[str, str]:
    return {
        name: _judge(found, called=name in seen.called)
        for name, found in sorted(seen.names.items())
    }


def _judge(found: Global, *, called: bool) -> str:
    if is_ordinary(found.module, found.name) or (
        not called and (found.module, found.name) in _ARGUMENTS
    ):
        return ORDINARY
    return UNSAFE if called else NAMED


def scan_file(path: Path, ranges: list[tuple[int, int]] | None = None) -> Iterator[Pickle]:
    """Yield all pickles of a file; none if the file is of another kind.

    ranges: (offset, bytes) of the files in a `.distcp` file or a tar archive. Raises CorruptCheckpoint for an archive
    with an impossible directory, and for anything but a regular file.
    """
    if not regular_size(path):
        return
    with (
        fdopen(open_regular(path, holes=True), "rb") as stream,
        mmap(stream.fileno(), 0, access=ACCESS_READ) as data,
    ):
        file = InputFile.open(path)
        for start, nbytes in [(0, file.size)] if ranges is None else ranges:
            head = file.read(start, min(nbytes, torch_legacy.MAGIC_BYTES, file.size - start))
            if head.startswith(ZIP):
                yield from _of_archive(file, start, nbytes)
                continue
            # The pickles of a legacy file are at its start; the pickles of other files may be anywhere.
            read = min(nbytes, PICKLE_BYTES) if head.startswith(torch_legacy.MAGICS) else nbytes
            file.require(start, start + read)
            yield from _of_content(data, start)
        file.close()


def _of_archive(file: InputFile, start: int, nbytes: int) -> Iterator[Pickle]:
    try:
        entries = read_directory(file, start, nbytes)
    except CorruptCheckpoint as error:
        yield from _of_compressed(file, start, nbytes, error)
        return
    for name, entry in entries.items():
        head = file.read(entry.offset, min(entry.nbytes, len(NUMPY)))
        if _is_storage(name, head):
            continue
        where = name
        if _is_pickle(name):
            where = f"{name} at byte {entry.offset}"
        content = file.read(entry.offset, min(entry.nbytes, PICKLE_BYTES))
        yield from _of_entry(name, content, where)


def _of_compressed(
    file: InputFile, start: int, nbytes: int, fault: CorruptCheckpoint
) -> Iterator[Pickle]:
    """Yield the pickles of a compressed archive: torch and numpy read compressed entries like others.

    Raises the fault if the archive has another problem than compression.
    """
    try:
        with ZipFile(range_of(file, start, nbytes)) as archive:
            infos = archive.infolist()
            # Entries that overlap would be inflated again and again.
            overlap = sum(info.compress_size for info in infos) > nbytes
            if overlap or not any(info.compress_type for info in infos):
                raise fault
            for info in infos:
                if not _is_storage(info.filename, _inflated(archive, info, len(NUMPY))):
                    yield from _of_entry(
                        info.filename, _inflated(archive, info, PICKLE_BYTES), info.filename
                    )
    except (
        BadZipFile,
        NotImplementedError,
        OSError,
        OverflowError,
        ValueError,
        struct.error,
    ):
        raise fault from None


def _inflated(archive: ZipFile, info: ZipInfo, nbytes: int) -> bytes:
    try:
        with archive.open(info) as entry:
            return entry.read(nbytes)
    except CheckpointError:
        raise
    except Exception as error:  # of a decompressor, whose module Python may lack
        raise BadZipFile(str(error)) from error


def _is_storage(name: str, head: bytes) -> bool:
    """True if an entry holds the values of a torch tensor, which no program reads as a pickle."""
    is_data = "/data/" in name and head != NUMPY and not _is_pickle(name)
    return not head or is_data


def _is_pickle(name: str) -> bool:
    return name.endswith((".pkl", ".pickle"))


def _of_entry(name: str, data: bytes, where: str) -> Iterator[Pickle]:
    if _is_pickle(name):
        yield scan_pickle(data, 0, where)
    else:
        yield from _of_content(data, 0, where)


def _of_content(data: mmap | bytes, start: int = 0, where: str = "") -> Iterator[Pickle]:
    """Yield the pickles of content that is not an archive: a sequence of pickles, or numpy's header and one pickle."""
    if data[start : start + len(NUMPY)] == NUMPY:
        offset = _behind_header(data, start)
        found = scan_pickle(data, offset, where or f"byte {offset}")
        if _cannot_be_chance(found):
            yield found
        return
    legacy = data[start : start + torch_legacy.MAGIC_BYTES].startswith(torch_legacy.MAGICS)
    offset, number = start, 0
    while offset < len(data):
        found = scan_pickle(data, offset, where or f"byte {offset}")
        if data[offset : offset + 2] in _PROTOCOLS or _cannot_be_chance(found):
            yield found
        number += 1
        if found.fault or found.end <= offset or (legacy and number == _PICKLES_OF_LEGACY):
            return
        offset = found.end
        if number == _MOST_IN_A_ROW and offset < len(data):
            fault = f"more than {_MOST_IN_A_ROW:,} pickles in a row, of which the others were not looked at"
            yield Pickle(where or f"byte {offset}", {}, fault, offset)
            return


def _behind_header(data: mmap | bytes, start: int) -> int:
    """The offset of the values of an array in numpy's own format."""
    size = 2 if data[start + 6 : start + 7] == b"\1" else 4
    return start + 8 + size + int.from_bytes(data[start + 8 : start + 8 + size], "little")


def _cannot_be_chance(found: Pickle) -> bool:
    """True if unmarked bytes really are a pickle: they call something, or they name something and come to an end.

    Text and numbers also read as instructions of a pickle, up to the first byte that doesn't.
    """
    wanted = {UNSAFE} if found.fault else {UNSAFE, NAMED, ORDINARY}
    return any(
        judged in wanted and _IDENTIFIER.fullmatch(name) for name, judged in found.names.items()
    )
