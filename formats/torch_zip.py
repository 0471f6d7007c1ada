"""Files of torch.save: a stored zip archive of one pickle and of the storages that it refers to.

    <root>/data.pkl                 the object (protocol 2)
    <root>/.format_version          "1"
    <root>/.storage_alignment       "64"
    <root>/byteorder                "little"
    <root>/data/0, 1, 2 …           storages
    <root>/version                  "3\\n"
    <root>/.data/serialization_id   40 digits

Source of the records, their names and their order: torch 2.13, torch/serialization.py and
caffe2/serialize/inline_container.cc.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from formats import pickle_guard, torch_legacy
from formats.ceilings import PICKLE_BYTES
from formats.entry_check import EntryCheck
from formats.errors import CorruptCheckpoint
from formats.held_range import Ranges, held
from formats.mistaken_files import SEEN_BYTES, mistaken
from formats.output import Piece, Record
from formats.pickle_writer import Constant, Placeholder, Varying, dumps, varying_bytes
from formats.stored_zip import (
    PlannedEntry,
    ZipEntry,
    directory,
    local_header,
    place,
    read_directory,
)
from formats.tensor import InputFile, byte_count
from formats.torch_storage import Storage, StorageId, lazy_tensor

__all__ = [
    "Constant", "NumberedLayout", "Placeholder", "Saved", "TorchZipLayout", "Varying", "plan", "read", "read_at", "read_saved",
]  # fmt: skip


class Saved(NamedTuple):
    """The content of a torch file, and the folder in its archive."""

    value: object
    folder: str | None
    """Name of the file without its ending at the time of saving. It is `archive` if torch didn't know a name, and None
    before torch 1.6."""


def read(path: Path) -> object:
    """The value that torch.load would return, without running anything. Tensors are lazy, and other objects are as in
    pickle_guard.load.

    The file is opened again when the first tensor is read. Raises CorruptCheckpoint, and UnsafeContent for a file that
    asks to run code.
    """
    return read_saved(path).value


def read_saved(path: Path) -> Saved:
    """The same value, with the name that the file had. Raises as `read` does."""
    file = InputFile.open(path)
    try:
        return _read(file)
    finally:
        file.close()


def read_at(file: InputFile, start: int, nbytes: int) -> object:
    """The object in a torch file that is a range of another file. Raises as `read` does."""
    return _read_zip(file, held(file, start, nbytes), start, nbytes).value


def _read(file: InputFile) -> Saved:
    start = file.read(0, min(file.size, SEEN_BYTES))
    if start.startswith(b"PK\3\4"):
        return _read_zip(file, file, 0, file.size)
    if start.startswith(torch_legacy.MAGICS):
        return Saved(torch_legacy.read(file), folder=None)
    instead = mistaken(start)
    if instead:
        raise CorruptCheckpoint(f"{file.path}: {instead}")
    what = f"neither a torch zip file nor one of torch before 1.6 ({file.size} bytes)"
    raise CorruptCheckpoint(f"{file.path}: is {what}; copy it again if it should be one")


def _read_zip(file: InputFile, small: Ranges, start: int, nbytes: int) -> Saved:
    """The content of an archive. small: the same file for everything but the storages."""
    records = read_directory(small, start, nbytes)
    root = _root(file, records)
    byte_order = records.get(f"{root}/byteorder")
    if byte_order is not None and _content(small, byte_order) != b"little":
        raise CorruptCheckpoint(
            f"{file.path}: was written on a big-endian machine; load and save it on another one"
        )

    checks: dict[str, EntryCheck | None] = {}  # one check for all tensors in a storage

    def check_of(name: str, record: ZipEntry) -> EntryCheck | None:
        # torch writes zeros for checksums if it is asked not to compute them.
        if not record.crc or not record.nbytes:
            return None
        if name not in checks:
            checks[name] = file.checked(record.offset, record.nbytes, record.crc)
        return checks[name]

    def storage(identity: object) -> Storage:
        part = StorageId.parse(identity, str(file.path))
        record = records.get(f"{root}/data/{part.name}")
        if record is None or part.nbytes > record.nbytes:
            found = f"has {record.nbytes} bytes" if record else "is missing"
            what = f"the storage {part.name[:80]!r} ({part.elements} elements of {part.dtype})"
            raise CorruptCheckpoint(f"{file.path}: {what} {found}; copy or save the file again")
        check = check_of(part.name, record)
        return Storage(file, record.offset, part.nbytes, part.dtype, check)

    content = _content(small, records[f"{root}/data.pkl"])
    value = pickle_guard.load(content, storage, source=str(file.path), tensor=lazy_tensor)
    return Saved(value, folder=root)


def _root(file: InputFile, records: Mapping[str, ZipEntry]) -> str:
    """The name of the one folder that holds everything."""
    roots = {name.partition("/")[0] for name in records}
    if len(roots) == 1 and f"{(root := roots.pop())}/data.pkl" in records:
        return root
    raise CorruptCheckpoint(
        f"{file.path}: is a zip file, but not one of torch.save (no single folder with a data.pkl)"
    )


def _content(file: Ranges, record: ZipEntry) -> bytes:
    """The bytes of an entry. torch writes zero as the checksum if it is asked not to compute it."""
    if record.nbytes > PICKLE_BYTES:
        raise CorruptCheckpoint(
            f"{file.path}: a data.pkl of {record.nbytes} bytes; the limit is {PICKLE_BYTES}"
        )
    content = file.read(record.offset, record.nbytes)
    if record.crc and crc32(content) != record.crc:
        raise CorruptCheckpoint(
            f"{file.path}: the checksum of the zip entry at {record.offset} is wrong; copy it again"
        )
    return content


@dataclass(frozen=True)
class TorchZipLayout:
    """The layout of a torch file, without the bytes of its tensors (a formats.output.FileLayout)."""

    size: int
    records: Mapping[str, Record]
    entries: tuple[PlannedEntry, ...] = field(repr=False)
    """Entries in file order."""
    contents: Mapping[str, bytes] = field(repr=False)
    """Entry name -> content, for entries that are not tensors."""
    keys: Mapping[str, str] = field(repr=False)
    """Entry name -> the tensor's key."""
    varying: tuple[str, int] | None = None
    """(entry, offset of the number in its content) for a value with a Varying."""
    needs_checksums: bool = True

    def numbered(self, number: int) -> "TorchZipLayout":
        """The same layout with this number in the place of the Varying."""
        if self.varying is None:
            raise ValueError("the file has no number that varies")
        name, start = self.varying
        content, digits = self.contents[name], varying_bytes(number)
        content = content[:start] + digits + content[start + len(digits) :]
        return replace(self, contents={**self.contents, name: content})

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of everything that is not a tensor. checksums: CRC-32 of each record, by key."""
        for piece in self.pieces():
            yield piece.offset, piece.content(checksums)

    def pieces(self) -> Iterator[Piece]:
        """The local headers, each with its content or known with its record, and the directory, which needs all records."""
        for entry in self.entries:
            key = self.keys.get(entry.name)
            content = self.contents.get(entry.name, b"")
            nbytes = entry.payload - entry.header + len(content)
            made = partial(_header, entry, content, key)
            yield Piece(entry.header, nbytes, () if key is None else (key,), made)
        start = _end(self.entries)
        yield Piece(start, self.size - start, tuple(self.keys.values()), self._directory)

    def _directory(self, checksums: Mapping[str, int]) -> bytes:
        crcs = {name: crc32(content) for name, content in self.contents.items()}
        crcs |= {name: checksums[key] for name, key in self.keys.items()}
        return directory(((entry, crcs[entry.name]) for entry in self.entries), _end(self.entries))


def _header(
    entry: PlannedEntry, content: bytes, key: str | None, checksums: Mapping[str, int]
) -> bytes:
    """The local header of an entry, and its content if it isn't a tensor. key: of the record that the entry is."""
    return local_header(entry, crc32(content) if key is None else checksums[key]) + content


@dataclass(frozen=True)
class NumberedLayout:
    """One of many files whose layouts differ only in one number (a formats.output.FileLayout)."""

    shared: TorchZipLayout
    number: int
    needs_checksums: bool = True

    @property
    def size(self) -> int:
        return self.shared.size

    @property
    def records(self) -> Mapping[str, Record]:
        return self.shared.records

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """The headers of the shared layout with this number. The bytes are made here, so that thousands of files need
        no pickle each."""
        return self.shared.numbered(self.number).headers(checksums)

    def pieces(self) -> Iterator[Piece]:
        """The pieces of the shared layout with this number."""
        return self.shared.numbered(self.number).pieces()


def plan(value: object, root: str) -> TorchZipLayout:
    """The layout of a torch file that holds value, whose tensors are Placeholders. `dumps` lists the other values that
    it may contain.

    root: the folder inside the archive. torch uses the file's name without its ending, and accepts any name.
    torch.load(weights_only=True) reads the file, with argparse.Namespace allowed if value contains one.
    """
    if not root or set("/\\:\0") & set(root) or root in (".", ".."):
        raise ValueError(f"can't call the folder inside a torch file {root!r}")
    pickle, storages, varying = dumps(value)
    before, after = _entries_around(root, pickle)

    # An archive holds the pickle, then the storages, then two entries of torch's own.
    contents = before | after
    sizes = {name: len(content) for name, content in before.items()}
    keys = {}
    for number, tensor in storages.items():
        name = f"{root}/data/{number}"
        sizes[name] = byte_count(tensor.shape, tensor.dtype)
        if isinstance(tensor, Constant):
            contents[name] = tensor.data
        else:
            keys[name] = tensor.key
    for name, content in after.items():
        sizes[name] = len(content)

    entries = tuple(place(sizes.items()))
    records = {}
    for entry in entries:
        if entry.name in keys:
            records[keys[entry.name]] = Record(entry.payload, entry.nbytes)
    end = _end(entries)
    directory_bytes = len(directory(((entry, 0) for entry in entries), end))
    numbered = None if varying is None else (f"{root}/data.pkl", varying)
    return TorchZipLayout(end + directory_bytes, records, entries, contents, keys, numbered)


def _entries_around(root: str, pickle: bytes) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """(the entries before the storages, those after them): name -> content."""
    identity = int(sha256(pickle).hexdigest(), 16) % 10**40
    before = {
        f"{root}/data.pkl": pickle,
        f"{root}/.format_version": b"1",
        f"{root}/.storage_alignment": b"64",
        f"{root}/byteorder": b"little",
    }
    after = {
        f"{root}/version": b"3\n",
        f"{root}/.data/serialization_id": b"%040d" % identity,
    }
    return before, after


def _end(entries: tuple[PlannedEntry, ...]) -> int:
    return entries[-1].payload + entries[-1].nbytes
