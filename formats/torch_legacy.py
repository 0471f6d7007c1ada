"""Files of torch.save before torch 1.6, and with `_use_new_zipfile_serialization=False`: pickles, then storages.

magic number · protocol (1001) · {"little_endian": …} · the object · [storage names]
per name: element count (int64) · elements
"""

import os
from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from typing import TypeGuard

from formats.ceilings import PICKLE_BYTES
from formats.errors import CorruptCheckpoint
from formats.pickle_guard import load_at
from formats.regular_files import open_regular
from formats.tensor import InputFile
from formats.torch_storage import Storage, StorageId, itemsize, lazy_tensor

_MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa850192e")
_FRAME = b"\x95" + len(_MAGIC).to_bytes(8, "little")
MAGICS = (
    b"\x80\2" + _MAGIC,
    b"\x80\3" + _MAGIC,
    b"\x80\4" + _FRAME + _MAGIC,
    b"\x80\5" + _FRAME + _MAGIC,
)
"""The file's first bytes: the pickle of 0x1950a86a20f9469cfc6c, in the protocol that torch.save was called with."""
MAGIC_BYTES = max(map(len, MAGICS))
_PROTOCOL = 1001


def read(file: InputFile) -> object:
    """The saved object, with lazy tensors. The places of the storages follow the object in the file, so the object is
    read twice."""
    most = min(file.size, PICKLE_BYTES)
    for data in _contents(file):
        try:
            return _read(file, data)
        except CorruptCheckpoint:
            if len(data) >= most:
                raise
    raise CorruptCheckpoint(f"{file.path}: is empty; copy it again")


def _contents(file: InputFile) -> Iterator[bytes | mmap]:
    """Yield the mapped file. For a stand-in, yield longer and longer beginnings, which hold the pickles and few storages."""
    if file.is_partial:
        for nbytes in (1 << 20, 16 << 20, PICKLE_BYTES):
            yield file.read(0, min(file.size, nbytes))
        return
    with (
        os.fdopen(open_regular(file.path), "rb") as stream,
        mmap(stream.fileno(), 0, access=ACCESS_READ) as data,
    ):
        yield data


def _read(file: InputFile, data: bytes | mmap) -> object:
    path = str(file.path)
    _, offset = load_at(data, 0, None, path)
    protocol, offset = load_at(data, offset, None, path)
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

    def note(identity: object) -> object:
        if is_module(identity):
            return identity[1]
        storage = StorageId.parse(identity, path)
        return seen.setdefault(storage.name, storage)

    _, offset = load_at(data, start, note, path, warns=False)
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
    if file.is_partial:
        file.expect(_counts(listed, seen, offset))
    storages: dict[str, Storage] = {}
    for name in listed:
        expected = seen[name]
        found = int.from_bytes(file.read(offset, 8), "little", signed=True)
        if found != expected.elements:
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


def _counts(names: list[str], seen: dict[str, StorageId], offset: int) -> list[tuple[int, int]]:
    """The ranges of the element counts before the storages, if all storages are as long as the pickle says."""
    spans = []
    for name in names:
        spans.append((offset, offset + 8))
        offset += 8 + seen[name].nbytes
    return spans


def is_module(identity: object) -> TypeGuard[tuple[object, ...]]:
    """True for the class of a module: ("module", class, file of its code, its code)."""
    return isinstance(identity, tuple) and len(identity) == 4 and identity[0] == "module"


def _part(identity: object, storages: dict[str, Storage], path: str) -> object:
    """A whole storage or, in files of very old versions, a view of one: (its name, first element, elements).

    A module's class stays a name.
    """
    if is_module(identity):
        return identity[1]
    part = StorageId.parse(identity, path)
    whole = storages[part.name]
    match part.view:
        case None:
            return whole
        case (_, int(first), int(count)) if first >= 0 and count >= 0:
            item_bytes = itemsize(whole.dtype)
            if (first + count) * item_bytes <= whole.nbytes:
                start = whole.offset + first * item_bytes
                return Storage(whole.file, start, count * item_bytes, whole.dtype)
    raise CorruptCheckpoint(
        f"{path}: has a view that reaches past the end of its storage; copy or save the file again"
    )
