"""Uncompressed tar archives, whose files are read in place: nothing is extracted.

    512 bytes: name [0:100], size [124:136] (octal, or base 256 behind 0x80), checksum [148:156], kind [156],
    `ustar` [257:262], prefix [345:500]; then the file, padded to 512 bytes; two empty blocks at the end
    kind `L` (GNU) and `x` (POSIX): a longer name of the file that follows; `g`: for all files, and skipped

Archives are refused if they contain things that no model needs, or that lead out of the archive: links, devices, sparse
files, absolute names, `..`, duplicate names. Source: POSIX.1-2001 pax, GNU tar's manual.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from formats.errors import CorruptCheckpoint, UnsafeContent, UnsupportedInput
from formats.tensor import InputFile

_BLOCK = 512
_MOST_MEMBERS = 100_000
_MOST_NAME_BYTES = 64 << 10
_GZIP = b"\x1f\x8b"


class Member(NamedTuple):
    """A regular file in an archive."""

    offset: int
    size: int


class _Header(NamedTuple):
    name: str
    size: int
    kind: bytes


def read_members(file: InputFile) -> dict[str, Member]:
    """The regular files by name, without a leading `./`. Raises CorruptCheckpoint, UnsafeContent, and UnsupportedInput
    for a compressed archive."""
    if file.size >= 2 and file.read(0, 2) == _GZIP:
        raise UnsupportedInput(
            f"{file.path}: is compressed, so that nothing in it can be read where it lies; unpack it (tar xzf), and give the directory"
        )
    found: dict[str, Member] = {}
    for header, offset in _headers(file):
        if header.kind == b"5":
            continue
        if header.kind not in (b"0", b"\0"):
            raise UnsafeContent(
                f"{file.path}: {header.name!r:.100} is a link or a device; no archive of a model has any"
            )
        name = _inside(header.name, file.path)
        if name in found:
            raise CorruptCheckpoint(f"{file.path}: has {name!r:.100} twice")
        if len(found) >= _MOST_MEMBERS:
            raise CorruptCheckpoint(f"{file.path}: has more than {_MOST_MEMBERS:,} files")
        found[name] = Member(offset, header.size)
    return found


def _headers(file: InputFile) -> Iterator[tuple[_Header, int]]:
    """Yield (header with its complete name, offset of the file's content)."""
    position, longer, large = 0, "", 0
    while position + _BLOCK <= file.size:
        block = file.read(position, _BLOCK)
        if not any(block):
            return
        header = _parse(block, file.path, position)
        start = position + _BLOCK
        if large:
            header = header._replace(size=large)
        if start + header.size > file.size:
            raise CorruptCheckpoint(
                f"{file.path}: {header.name!r:.100} should have {header.size:,} bytes, "
                "but the archive ends before; copy it again",
                code="truncated-file",
            )
        content_blocks = -(-header.size // _BLOCK)
        position = start + content_blocks * _BLOCK
        if header.kind in (b"L", b"x", b"g"):
            if header.size > _MOST_NAME_BYTES:
                raise CorruptCheckpoint(f"{file.path}: a name of {header.size:,} bytes")
            text = file.read(start, header.size)
            if header.kind != b"g":
                longer, large = _extended(text, header.kind, file.path)
            continue
        yield header._replace(name=longer or header.name), start
        longer, large = "", 0
    raise CorruptCheckpoint(
        f"{file.path}: ends without the two empty blocks of an archive; copy it again",
        code="truncated-file",
    )


def _size(field: bytes) -> int:
    """A size in octal digits or, if it has too many digits, in bytes after the mark 0x80."""
    return int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)


def _parse(block: bytes, path: Path, position: int) -> _Header:
    try:
        unsigned = sum(block[:148]) + 8 * ord(" ") + sum(block[156:])
        if _octal(block[148:156]) != unsigned:
            raise ValueError("its checksum is wrong")
        size = _size(block[124:136])
        name = _text(block[:100])
        prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    except ValueError as error:
        raise CorruptCheckpoint(
            f"{path}: no header of a tar archive at byte {position} ({error}); copy it again"
        ) from error
    return _Header(f"{prefix}/{name}" if prefix else name, size, block[156:157])


def _octal(field: bytes) -> int:
    """The number of an octal field of digits only: int() also accepts signs, and a negative size would lead back to
    bytes already read."""
    digits = field.strip(b" \0")
    if not re.fullmatch(rb"[0-7]*", digits):
        raise ValueError(f"{digits!r} is no number")
    return int(digits or b"0", 8)


def _text(field: bytes) -> str:
    return field.split(b"\0")[0].decode("utf-8")


def _extended(text: bytes, kind: bytes, path: Path) -> tuple[str, int]:
    """(name, size) of the file that follows. Size is 0 if the file's own header has it; that header holds sizes up to 8
    GiB."""
    try:
        if kind == b"L":
            return _text(text), 0
        fields = dict(_fields(text))
        if any(key.startswith(b"GNU.sparse") for key in fields):
            raise ValueError("a sparse file")
        size = fields.get(b"size", b"0")
        if not re.fullmatch(rb"[0-9]{1,19}", size):
            raise ValueError(f"a size of {size!r:.40}")
        return fields.get(b"path", b"").decode("utf-8"), int(size)
    except ValueError as error:
        raise CorruptCheckpoint(
            f"{path}: an extended header that can't be read ({error})"
        ) from error


def _fields(text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) of the lines `length key=value`. The length counts the whole line. Raises ValueError."""
    start = 0
    while start < len(text):
        digits, space, _ = text[start : start + 8].partition(b" ")
        if not space or not re.fullmatch(rb"[0-9]+", digits):
            raise ValueError(f"no length at byte {start}")
        end = start + int(digits)
        after_length = start + len(digits) + 1
        key, equals, value = text[after_length:end].partition(b"=")
        is_complete = value.endswith(b"\n") and end <= len(text)
        if not key or not equals or not is_complete:
            raise ValueError(f"no key=value at byte {start}")
        yield key, value[:-1]
        start = end


def _inside(name: str, path: Path) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name:
        raise UnsafeContent(f"{path}: has a file {name!r:.100}, which reaches out of the archive")
    return "/".join(parts)
