"""Zip archives whose entries are stored and not compressed, so that each is a range of the file. torch files use this
format.

    per entry:   local header (30 bytes) · name · extra fields · payload
    at the end:  one directory header per entry (46 bytes · name · extra fields) · end of directory

Reading trusts nothing: the directory and the local headers must agree. Writing puts each payload at the offset that
torch would choose, at a multiple of 64. The padding is an extra field, as in torch. Numbers that don't fit into 32 bits
are in zip64 extra fields. Format: PKWARE's APPNOTE.TXT 6.3, sections 4.3 to 4.5.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from stat import S_ISLNK
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile, ZipInfo

from formats.errors import CorruptCheckpoint
from formats.held_range import Ranges
from formats.streams import range_of

_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")

ALIGNMENT = 64
_FULL = 0xFFFFFFFF
"""The value of a 32-bit field whose number is in the zip64 extra field. torch uses the extra field from this number on.
"""
_UTF8 = 0x800
_DESCRIPTOR_FOLLOWS = 0x8
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_MIDNIGHT_1980 = 0, 0x21


class ZipEntry(NamedTuple):
    """An entry of an archive. offset: offset of the payload in the file."""

    offset: int
    nbytes: int
    crc: int


def read_directory(file: Ranges, start: int = 0, nbytes: int | None = None) -> dict[str, ZipEntry]:
    """The entries of an archive by name, without folders. Offsets are those in the file.

    start, nbytes: the range of the archive in the file; the whole file by default.

    Raises CorruptCheckpoint for everything that no writer of checkpoints makes: compression, encryption, duplicate
    names, names that lead out of the archive, overlapping entries, and a directory that contradicts the local headers.
    """
    try:
        with ZipFile(
            range_of(file, start, file.size - start if nbytes is None else nbytes)
        ) as archive:
            infos, end = archive.infolist(), start + archive.start_dir
    except (
        BadZipFile,
        NotImplementedError,
        EOFError,
        OSError,
        OverflowError,
        ValueError,
        struct.error,
    ) as error:
        raise CorruptCheckpoint(
            f"{file.path}: a zip file without a valid directory at its end ({error}); it is incomplete, copy it again",
            code="truncated-file",
        ) from error
    if file.is_partial:  # one request for each header would take longer than the tensors
        file.expect([_header_span(info, start) for info in infos])
    entries: dict[str, ZipEntry] = {}
    for info in sorted(infos, key=lambda info: info.header_offset, reverse=True):
        entry = _locate(file, info, start)
        if entry.offset + entry.nbytes > end:
            raise CorruptCheckpoint(
                f"{file.path}: the zip entry {info.orig_filename!r} overlaps another; copy it again"
            )
        if info.orig_filename in entries:
            raise CorruptCheckpoint(
                f"{file.path}: has duplicate entries called {info.orig_filename!r}; it was tampered with"
            )
        entries[info.orig_filename] = entry
        end = start + info.header_offset
    return {name: entry for name, entry in reversed(entries.items()) if not name.endswith("/")}


def _header_span(info: ZipInfo, start: int) -> tuple[int, int]:
    """The range of a local header and the name behind it. start: offset of the archive."""
    place = start + info.header_offset
    return place, place + _LOCAL.size + len(info.orig_filename.encode())


def _locate(file: Ranges, info: ZipInfo, start: int) -> ZipEntry:
    """The place of an entry whose two descriptions agree. start: offset of the archive."""
    what = f"{file.path}: the zip entry {info.orig_filename!r}"
    if _leads_out(info):
        raise CorruptCheckpoint(f"{what} leads out of the archive; it was tampered with")
    if info.flag_bits & _ENCRYPTED:
        raise CorruptCheckpoint(f"{what} is encrypted; decrypt the file first")
    if info.compress_type or info.file_size != info.compress_size:
        raise CorruptCheckpoint(
            f"{what} is compressed; use torch.save on a state_dict(), or `zip -0 -r`"
        )
    raw_name = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")
    place = start + info.header_offset
    header = file.read(place, _LOCAL.size + len(raw_name))
    if not _same_description(header, info, raw_name):
        raise CorruptCheckpoint(
            f"{what} has two descriptions that differ; copy or save the file again"
        )
    *_, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
    return ZipEntry(place + _LOCAL.size + name_bytes + extra_bytes, info.file_size, info.CRC)


def _leads_out(info: ZipInfo) -> bool:
    """True if the name is not a plain relative path, or the entry is a link."""
    name = info.orig_filename
    parts = name.removesuffix("/").split("/")
    if {"", ".", ".."} & set(parts) or "\\" in name or "\0" in name:
        return True
    has_drive = len(parts[0]) == 2 and parts[0].endswith(":")
    return has_drive or S_ISLNK(info.external_attr >> 16)


def _same_description(header: bytes, info: ZipInfo, raw_name: bytes) -> bool:
    """True if the header in front of the entry agrees with the archive's directory.

    header: the local header and as many bytes of the name as the directory's name has.
    """
    signature, _, flags, method, _, _, crc, packed, unpacked, name_bytes, _ = _LOCAL.unpack_from(
        header
    )
    if signature != b"PK\3\4" or method or flags & _ENCRYPTED:
        return False
    if name_bytes != len(raw_name) or header[_LOCAL.size :] != raw_name:
        return False
    if flags & _DESCRIPTOR_FOLLOWS:
        # The checksum and the sizes follow the entry, and are zero here.
        return True
    return bool(crc == info.CRC and {packed, unpacked} <= {info.file_size, _FULL})


@dataclass(frozen=True)
class PlannedEntry:
    """The place of an entry in a file. The room of its header includes the padding, so headers and payloads leave no
    gaps."""

    name: str
    header: int
    payload: int
    nbytes: int


def place(entries: Iterable[tuple[str, int]]) -> Iterator[PlannedEntry]:
    """Yield the places of entries with the given (name, size), one after another, as torch places them.

    torch may compute offsets instead of reading them (for fake tensors, for example). It then counts a descriptor of 16
    or 24 bytes after each payload. These files have no descriptors, since the headers hold the checksums. The padding
    of the next header takes the descriptor's room.
    """
    header = expected = 0
    for name, nbytes in entries:
        room = _LOCAL.size + len(name.encode()) + 4
        if max(expected, nbytes) >= _FULL:
            room += 4 + 16 * (nbytes >= _FULL) + 8 * (expected >= _FULL)
        payload = -(-(expected + room) // ALIGNMENT) * ALIGNMENT
        yield PlannedEntry(name, header, payload, nbytes)
        header = payload + nbytes
        descriptor = 24 if max(expected, nbytes) >= _FULL else 16
        expected = header + descriptor * (nbytes > 0)


def local_header(entry: PlannedEntry, crc: int) -> bytes:
    """The bytes from entry.header to entry.payload."""
    name = entry.name.encode()
    large = entry.nbytes >= _FULL
    extra = _zip64(entry.nbytes, entry.nbytes) if large else b""
    padding = entry.payload - entry.header - _LOCAL.size - len(name) - len(extra)
    extra += struct.pack("<2sH", b"FB", padding - 4).ljust(padding, b"Z")
    size = min(entry.nbytes, _FULL)
    fields = 45 if large else 20, _UTF8, 0, *_MIDNIGHT_1980, crc, size, size, len(name), len(extra)
    return _LOCAL.pack(b"PK\3\4", *fields) + name + extra


def directory(entries: Iterable[tuple[PlannedEntry, int]], start: int) -> bytes:
    """The directory headers of (entry, crc) and the end of the archive, for the offset start. Their length doesn't
    depend on the CRCs."""
    headers = [_header(entry, crc) for entry, crc in entries]
    count, size = len(headers), sum(map(len, headers))
    end = b""
    if count >= 0xFFFF or max(size, start) >= _FULL:
        end = _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
        end += _LOCATOR64.pack(b"PK\6\7", 0, start + size, 1)
    count, size, start = min(count, 0xFFFF), min(size, _FULL), min(start, _FULL)
    return b"".join(headers) + end + _END.pack(b"PK\5\6", 0, 0, count, count, size, start, 0)


def _header(entry: PlannedEntry, crc: int) -> bytes:
    name = entry.name.encode()
    extra = _zip64(
        *(number for number in (entry.nbytes, entry.nbytes, entry.header) if number >= _FULL)
    )
    size, header = min(entry.nbytes, _FULL), min(entry.header, _FULL)
    version = 45 if extra else 20
    fields = (
        version,
        version,
        _UTF8,
        0,
        *_MIDNIGHT_1980,
        crc,
        size,
        size,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        header,
    )
    return _ENTRY.pack(b"PK\1\2", *fields) + name + extra


def _zip64(*numbers: int) -> bytes:
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
