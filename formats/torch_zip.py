"""torch.save files: a stored zip archive of one pickle and of the storages that it refers to.

    <root>/data.pkl                 the object (protocol 2)
    <root>/.format_version          "1"
    <root>/.storage_alignment       "64"
    <root>/byteorder                "little"
    <root>/data/0, 1, 2 …           storages
    <root>/version                  "3\\n"
    <root>/.data/serialization_id   40 digits

Records, names and their order: torch 2.13, torch/serialization.py and caffe2/serialize/inline_container.cc.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from isal.isal_zlib import crc32

from formats import pickle_guard, torch_legacy
from formats.ceilings import PICKLE_BYTES
from formats.entry_check import EntryCheck
from formats.errors import CorruptCheckpoint
from formats.mistaken_files import SEEN_BYTES, mistaken
from formats.output import Record
from formats.pickle_writer import Constant, Placeholder, dumps
from formats.stored_zip import PlannedEntry, ZipEntry, directory, local_header, place, read_directory
from formats.tensor import InputFile, byte_count
from formats.torch_storage import Storage, StorageId, lazy_tensor

__all__ = ["Constant", "Placeholder", "TorchZipLayout", "plan", "read", "read_at"]


def read(path: Path) -> object:
    """What torch.load would return, without running anything: tensors are lazy, other objects as in pickle_guard.load.

    The file is open again when the first tensor is read. Raises CorruptCheckpoint, and UnsafeContent for a file that
    asks to run code.
    """
    file = InputFile.open(path)
    try:
        return _read(file)
    finally:
        file.close()


def read_at(file: InputFile, start: int, nbytes: int) -> object:
    """The object in a torch file that is a range of another file. Raises as `read` does."""
    return _read_zip(file, start, nbytes)


def _read(file: InputFile) -> object:
    start = file.read(0, min(file.size, SEEN_BYTES))
    if start.startswith(b"PK\3\4"):
        return _read_zip(file)
    if start.startswith(torch_legacy.MAGIC):
        return torch_legacy.read(file)
    instead = mistaken(start)
    if instead:
        raise CorruptCheckpoint(f"{file.path}: {instead}")
    what = f"neither a torch zip file nor one of torch before 1.6 ({file.size} bytes)"
    raise CorruptCheckpoint(f"{file.path}: is {what}; copy it again if it should be one")


def _read_zip(file: InputFile, start: int = 0, nbytes: int | None = None) -> object:
    records = read_directory(file, start, nbytes)
    root = _root(file, records)
    if f"{root}/byteorder" in records and _content(file, records[f"{root}/byteorder"]) != b"little":
        raise CorruptCheckpoint(f"{file.path}: was written on a big-endian machine; load and save it on another one")

    checks: dict[str, EntryCheck | None] = {}  # one for all tensors in a storage

    def storage(identity: object) -> Storage:
        part = StorageId.parse(identity, str(file.path))
        record = records.get(f"{root}/data/{part.name}")
        if record is None or (part.nbytes or 0) > record.nbytes:
            found = f"has {record.nbytes} bytes" if record else "is missing"
            what = f"the storage {part.name[:80]!r} ({part.elements} elements of {part.dtype})"
            raise CorruptCheckpoint(f"{file.path}: {what} {found}; copy or save the file again")
        if part.name not in checks:  # torch writes zeros for checksums when asked not to compute them
            known = record.crc and record.nbytes
            checks[part.name] = file.checked(record.offset, record.nbytes, record.crc) if known else None
        nbytes = record.nbytes if part.nbytes is None else part.nbytes
        return Storage(file, record.offset, nbytes, part.dtype, checks[part.name])

    content = _content(file, records[f"{root}/data.pkl"])
    return pickle_guard.load(content, storage, source=str(file.path), tensor=lazy_tensor)


def _root(file: InputFile, records: Mapping[str, ZipEntry]) -> str:
    """The one folder that holds everything."""
    roots = {name.partition("/")[0] for name in records}
    if len(roots) == 1 and f"{(root := roots.pop())}/data.pkl" in records:
        return root
    raise CorruptCheckpoint(f"{file.path}: is a zip file, but not one of torch.save (no single folder with a data.pkl)")


def _content(file: InputFile, record: ZipEntry) -> bytes:
    """torch writes zeros for checksums when asked not to compute them."""
    if record.nbytes > PICKLE_BYTES:
        raise CorruptCheckpoint(f"{file.path}: a data.pkl of {record.nbytes} bytes; the limit is {PICKLE_BYTES}")
    content = file.read(record.offset, record.nbytes)
    if record.crc and crc32(content) != record.crc:
        raise CorruptCheckpoint(
            f"{file.path}: the checksum of the zip entry at {record.offset} is wrong; copy it again"
        )
    return content


@dataclass(frozen=True)
class TorchZipLayout:
    """A torch file without the bytes of its tensors (a formats.output.FileLayout)."""

    size: int
    records: Mapping[str, Record]
    entries: tuple[PlannedEntry, ...] = field(repr=False)
    """In file order."""
    contents: Mapping[str, bytes] = field(repr=False)
    """Of entries that are not tensors, by entry name."""
    keys: Mapping[str, str] = field(repr=False)
    """Of tensors, by entry name."""
    needs_checksums: bool = True

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of everything that is not a tensor. checksums: CRC-32 of each record, by key."""
        crcs = {name: crc32(content) for name, content in self.contents.items()}
        crcs |= {name: checksums[key] for name, key in self.keys.items()}
        for entry in self.entries:
            yield entry.header, local_header(entry, crcs[entry.name]) + self.contents.get(entry.name, b"")
        start = _end(self.entries)
        yield start, directory(((entry, crcs[entry.name]) for entry in self.entries), start)


def plan(value: object, root: str) -> TorchZipLayout:
    """Lay out a torch file that holds value, whose tensors are Placeholders; `dumps` says what else it may contain.

    root: the folder inside the archive; torch uses the file's name without its ending, and accepts any.
    torch.load(weights_only=True) reads the file, with argparse.Namespace allowed if value contains one.
    """
    if not root or set("/\\:\0") & set(root) or root in (".", ".."):
        raise ValueError(f"can't call the folder inside a torch file {root!r}")
    pickle, storages = dumps(value)
    identity = int(sha256(pickle).hexdigest(), 16) % 10**40
    before = {"data.pkl": pickle, ".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
    after = {"version": b"3\n", ".data/serialization_id": b"%040d" % identity}
    stored = {f"{root}/data/{name}": tensor for name, tensor in storages.items()}
    tensors = {name: tensor for name, tensor in stored.items() if isinstance(tensor, Placeholder)}
    contents = {f"{root}/{name}": content for name, content in (before | after).items()}
    contents |= {name: tensor.data for name, tensor in stored.items() if isinstance(tensor, Constant)}
    sizes = {f"{root}/{name}": len(content) for name, content in before.items()}
    sizes |= {name: byte_count(tensor.shape, tensor.dtype) for name, tensor in stored.items()}
    sizes |= {f"{root}/{name}": len(content) for name, content in after.items()}
    entries = tuple(place(sizes.items()))
    records = {tensors[m.name].key: Record(m.payload, m.nbytes) for m in entries if m.name in tensors}
    size = _end(entries) + len(directory(((entry, 0) for entry in entries), _end(entries)))
    return TorchZipLayout(size, records, entries, contents, {name: tensor.key for name, tensor in tensors.items()})


def _end(entries: tuple[PlannedEntry, ...]) -> int:
    return entries[-1].payload + entries[-1].nbytes
