"""Files of torch.save before torch 1.6, and with `_use_new_zipfile_serialization=False`: pickles, then storages.

magic number · protocol (1001) · {"little_endian": …} · the object · [storage names]
per name: element count (int64) · elements
"""

import os
from mmap import ACCESS_READ, mmap

from formats.errors import CorruptCheckpoint
from formats.pickle_guard import load_at
from formats.regular_files import open_regular
from formats.tensor import ITEMSIZE, InputFile
from formats.torch_storage import Storage, StorageId, lazy_tensor

MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""The file's first bytes: the pickle of 0x1950a86a20f9469cfc6c."""
_PROTOCOL = 1001


def read(file: InputFile) -> object:
    """The saved object, with lazy tensors. The places of the storages follow the object in the file, so the object is
    read twice."""
    path = str(file.path)
    with (
        os.fdopen(open_regular(file.path), "rb") as stream,
        mmap(stream.fileno(), 0, access=ACCESS_READ) as data,
    ):
        protocol, offset = load_at(data, len(MAGIC), None, path)
        if protocol != _PROTOCOL:
            raise CorruptCheckpoint(
                f"{path}: is not of protocol {_PROTOCOL}; save it again with torch 1.6 or newer"
            )
        system, start = load_at(data, offset, None, path)
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise CorruptCheckpoint(
                f"{path}: was written on a big-endian machine; load and save it on another one"
            )
        seen: dict[str, StorageId] = {}

        def note(identity: object) -> StorageId:
            storage = StorageId.parse(identity, path)
            return seen.setdefault(storage.name, storage)

        _, offset = load_at(data, start, note, path)
        names, offset = load_at(data, offset, None, path)
        storages = _locate(file, names, seen, offset)
        value, _ = load_at(
            data, start, lambda identity: _part(identity, storages, path), path, lazy_tensor
        )
        return value


def _locate(
    file: InputFile, names: object, seen: dict[str, StorageId], offset: int
) -> dict[str, Storage]:
    """The storages of a file by name, from offset on. Raises CorruptCheckpoint unless they equal `seen`."""
    listed: list[str] = []
    if isinstance(names, list):
        listed = [name for name in names if isinstance(name, str)]
    if len(listed) != len(seen) or set(listed) != set(seen):
        raise CorruptCheckpoint(
            f"{file.path}: its storages don't match its tensors; copy the file again"
        )
    storages: dict[str, Storage] = {}
    for name in listed:
        expected = seen[name]
        found = int.from_bytes(file.read(offset, 8), "little", signed=True)
        if expected.nbytes is None or found != expected.elements:
            raise CorruptCheckpoint(
                f"{file.path}: has a storage of {found} elements of {expected.dtype}, "
                f"expected {expected.elements}; copy or save the file again"
            )
        storages[name] = Storage(file, offset + 8, expected.nbytes, expected.dtype)
        offset += 8 + expected.nbytes
    if offset > file.size:
        raise CorruptCheckpoint(
            f"{file.path}: has {file.size} bytes but needs {offset}; copy the file again"
        )
    return storages


def _part(identity: object, storages: dict[str, Storage], path: str) -> Storage:
    """A whole storage or, in files of very old versions, a view of one: (its name, first element, elements)."""
    part = StorageId.parse(identity, path)
    whole = storages[part.name]
    match part.view:
        case None:
            return whole
        case (_, int(first), int(count)) if first >= 0 and count >= 0:
            itemsize = ITEMSIZE[whole.dtype]
            if (first + count) * itemsize <= whole.nbytes:
                return Storage(
                    whole.file, whole.offset + first * itemsize, count * itemsize, whole.dtype
                )
    raise CorruptCheckpoint(
        f"{path}: has a view that reaches past the end of its storage; copy or save the file again"
    )
