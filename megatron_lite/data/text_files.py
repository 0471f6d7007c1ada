"""Reads text files: JSON lines, plain or compressed with gzip or zstandard, and parquet. The first bytes of a file show its format."""

import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.packages import package

STDIN = "-"
CHUNK_BYTES = 1 << 20
BATCH_RECORDS = 512

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Of UTF-8: Windows puts it at the beginning of text files. It is no text."""
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
_SKIPPED = tuple(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))
"""Begin frames without content, which pzstd writes before each other frame."""
ZSTD = (b"\x28\xb5\x2f\xfd", *_SKIPPED)


@dataclass(frozen=True)
class Batch:
    """Consecutive records of one file."""

    source: str
    first: int
    """Number of the first record (line or row), from 1."""
    records: Sequence[bytes | Mapping[str, Any]]
    """Lines of JSON, or rows by column."""
    size: int
    """Bytes of uncompressed text."""


def read_batches(inputs: Iterable[str], keys: Sequence[str] | None) -> Iterator[Batch]:
    """Yield all records, in order. keys: columns that a table must have; None: read all columns.

    Raises CorruptCheckpoint with the file's name if it can't be read to its end.
    """
    for name in inputs:
        with _opened(name) as file:
            start = file.peek(4)[:4]  # type: ignore[attr-defined]
            if start == PARQUET:
                yield from _rows(name, file, keys)
            else:
                yield from _lines(name, _chunks(name, file, start))


def read_start(name: str) -> bytes:
    """Return the first piece of a file's uncompressed content; of parquet, of the file itself. Raises CorruptCheckpoint."""
    with _opened(name) as file:
        return next(_chunks(name, file, file.peek(4)[:4]), b"")  # type: ignore[attr-defined]


def read_whole(name: str) -> bytes:
    """Return the uncompressed content of a file. Raises CorruptCheckpoint."""
    with _opened(name) as file:
        return b"".join(_chunks(name, file, file.peek(4)[:4]))  # type: ignore[attr-defined]


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    if name == STDIN:
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115, PTH123
    except OSError as error:
        raise CorruptCheckpoint(f"{name}: can't be read: {error.strerror}") from error
    with file:
        yield file


def _chunks(name: str, file: BinaryIO, start: bytes) -> Iterator[bytes]:
    """Yield the uncompressed content without a byte order mark."""
    is_first = True
    for chunk in _with_mark(name, file, start):
        yield chunk.removeprefix(BYTE_ORDER_MARK) if is_first else chunk
        is_first = is_first and not chunk


def _with_mark(name: str, file: BinaryIO, start: bytes) -> Iterator[bytes]:
    try:
        if start.startswith(GZIP):
            yield from _pieces(gzip.GzipFile(fileobj=file))
        elif start.startswith(ZSTD):
            yield from _zstd_chunks(name, file)
        else:
            yield from _pieces(file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorruptCheckpoint(f"{name}: is truncated or damaged: {error}") from error


def _pieces(file: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _zstd_chunks(name: str, file: BinaryIO) -> Iterator[bytes]:
    """Decompress frame by frame, because the package's reader doesn't detect a file that ends inside a frame."""
    zstandard = package("zstandard", f"{name}: reading it")
    frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    try:
        for piece in _pieces(file):
            while piece:
                begun = True
                yield frame.decompress(piece)
                piece = b""
                if frame.eof:
                    piece = frame.unused_data
                    frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    except zstandard.ZstdError as error:
        raise CorruptCheckpoint(f"{name}: is truncated or damaged: {error}") from error
    if begun:
        raise CorruptCheckpoint(f"{name}: is truncated: it ends inside of a zstandard frame")


def _lines(name: str, chunks: Iterator[bytes]) -> Iterator[Batch]:
    rest: list[bytes] = []
    number = 1
    for chunk in chunks:
        if b"\n" not in chunk:
            rest.append(chunk)
            continue
        lines = b"".join([*rest, chunk]).split(b"\n")
        rest = [lines.pop()]
        yield from _batches(name, number, lines)
        number += len(lines)
    if last := b"".join(rest):
        yield from _batches(name, number, [last])


def _batches(name: str, number: int, lines: list[bytes]) -> Iterator[Batch]:
    for start in range(0, len(lines), BATCH_RECORDS):
        records = lines[start : start + BATCH_RECORDS]
        yield Batch(name, number + start, records, sum(map(len, records)) + len(records))


def _rows(name: str, file: BinaryIO, keys: Sequence[str] | None) -> Iterator[Batch]:
    if name == STDIN:
        raise UsageError(
            "--input -: parquet can't be read from standard input; give the file's name"
        )
    pyarrow, parquet = (
        package(module, f"{name}: reading it") for module in ("pyarrow", "pyarrow.parquet")
    )
    try:
        table = parquet.ParquetFile(file, page_checksum_verification=True)
        missing = [key for key in keys or () if key not in table.schema_arrow.names]
        if missing:
            raise CorruptCheckpoint(
                f"{name}: has no column {', '.join(missing)}; there are {', '.join(table.schema_arrow.names)}: see --json-keys"
            )
        number = 1
        for part in table.iter_batches(
            batch_size=BATCH_RECORDS, columns=None if keys is None else list(keys)
        ):
            yield Batch(name, number, part.to_pylist(), part.nbytes)
            number += part.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise CorruptCheckpoint(f"{name}: is truncated or damaged: {error}") from error
