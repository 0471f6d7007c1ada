"""Files of text: JSON lines, plain or compressed with gzip or zstandard, and parquet; distinguished by their first bytes."""

import glob
import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from formats.errors import CorruptCheckpoint
from megaconv.errors import UsageError
from megatron_lite.data.packages import package

STDIN = "-"
CHUNK_BYTES = 1 << 20
BATCH_RECORDS = 512

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"


@dataclass(frozen=True)
class Batch:
    """Consecutive records of one file."""

    source: str
    first: int
    """Number of the first record: a line, or a row; from 1."""
    records: Sequence[bytes | Mapping[str, Any]]
    """Lines of JSON, or rows by column."""
    size: int
    """Bytes of uncompressed text."""


def find_inputs(words: Sequence[str], flag: str = "--input") -> list[str]:
    """Files in order, patterns spelled out and sorted. Raises UsageError for one that is not there."""
    found: list[str] = []
    for word in words:
        matches = [word] if word == STDIN or Path(word).exists() else sorted(glob.glob(word, recursive=True))  # noqa: PTH207
        if not matches:
            raise UsageError(f"{flag} {word}: there is no such file, and no file matches it as a pattern")
        for match in matches:
            if Path(match).is_dir():
                raise UsageError(f"{flag} {match}: is a directory; write {match}/*.jsonl")
        found += matches
    if found.count(STDIN) > 1:
        raise UsageError(f"{flag}: standard input can be read once only")
    return found


def read_batches(inputs: Iterable[str], keys: Sequence[str] | None) -> Iterator[Batch]:
    """All records, in order. keys: columns that a table has to have; None: all of its columns are read.

    Raises CorruptCheckpoint, naming the file, for one that can't be read to its end.
    """
    for name in inputs:
        with _opened(name) as file:
            start = file.peek(4)[:4]  # type: ignore[attr-defined]
            if start == PARQUET:
                yield from _rows(name, file, keys)
            else:
                yield from _lines(name, _chunks(name, file, start))


def read_start(name: str) -> bytes:
    """The first piece of a file's uncompressed content; of parquet, of the file itself. Raises CorruptCheckpoint."""
    with _opened(name) as file:
        return next(_chunks(name, file, file.peek(4)[:4]), b"")  # type: ignore[attr-defined]


def read_whole(name: str) -> bytes:
    """Uncompressed. Raises CorruptCheckpoint."""
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
    """Frame by frame, because the reader of the package doesn't detect a file that ends inside of one."""
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
        raise UsageError("--input -: parquet can't be read from standard input; give the file's name")
    pyarrow, parquet = (package(module, f"{name}: reading it") for module in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.ParquetFile(file, page_checksum_verification=True)
        missing = [key for key in keys or () if key not in table.schema_arrow.names]
        if missing:
            raise CorruptCheckpoint(
                f"{name}: has no column {', '.join(missing)}; there are {', '.join(table.schema_arrow.names)}: see --json-keys"
            )
        number = 1
        for part in table.iter_batches(batch_size=BATCH_RECORDS, columns=None if keys is None else list(keys)):
            yield Batch(name, number, part.to_pylist(), part.nbytes)
            number += part.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise CorruptCheckpoint(f"{name}: is truncated or damaged: {error}") from error
