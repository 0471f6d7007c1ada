"""Megatron's indexed dataset: the tokens of many sequences in one file, and an index file.

    PREFIX.bin      the tokens of all sequences, concatenated, nothing else

    PREFIX.idx      all little-endian, nothing aligned:
        0   9 bytes     "MMIDIDX", two zeros
        9   uint64      version: 1
       17   uint8       code of the tokens' dtype
       18   uint64      S, number of sequences
       26   uint64      D, number of entries of the document array
       34   int32[S]    tokens of each sequence
            int64[S]    start of each sequence in the .bin, in bytes
            int64[D]    0, then the number of sequences up to the end of each document
            int8[S]     mode of each sequence: only in multimodal datasets, and only the size of the file shows it

Data for GPT has one sequence per document, data for BERT and T5 one per sentence. Format of megatron-core 0.16.
"""

import glob
import mmap
import struct
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from formats.errors import CorruptCheckpoint
from formats.file_limit import is_limit, limit_reached
from megatron_lite.data.tokens import Documents, TokenDtype, Tokens

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES: dict[int, TokenDtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Dtypes of tokens by code. Codes 6 and 7 are floats and refused: 7 has 4 bytes in Megatron core but 8 in its forerunners."""
CODES = {dtype: code for code, dtype in DTYPES.items()}

_BLOCK = 1 << 20


def token_dtype(vocab_size: int) -> TokenDtype:
    """Return Megatron's dtype for tokens: two bytes for a vocabulary below 65500, else four."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


class TokenFile(Protocol):
    """The .bin of a dataset. Any thread may use it."""

    def __len__(self) -> int:
        """Size in bytes."""
        ...

    def read(self, start: int, nbytes: int) -> bytes | memoryview:
        """The bytes from `start` on, which lie inside the file."""
        ...


class _MappedTokens:
    """A local .bin. It stays mapped; `read` returns a read-only view of the map."""

    def __init__(self, path: Path) -> None:
        self._content = memoryview(_map(path))

    def __len__(self) -> int:
        return len(self._content)

    def read(self, start: int, nbytes: int) -> memoryview:
        return self._content[start : start + nbytes]


class IndexedDataset(Documents):
    """Sequences by number. Local files stay mapped; `get` then returns a read-only view of the map.

    lengths: int32[S], tokens of each sequence.
    documents: int64[D], document k is the sequences documents[k] to documents[k + 1].
    modes: int8[S] of a multimodal dataset, else None.
    Raises CorruptCheckpoint with the file's name for inconsistent content.
    """

    def __init__(
        self, prefix: str | Path, index: Path | None = None, tokens: TokenFile | None = None
    ) -> None:
        """index, tokens: a local copy of the .idx and the .bin if they lie in a store; prefix is their URI then."""
        self.prefix = str(prefix)
        if tokens is None:
            _require_files(prefix)
        path = f"{self.prefix}.idx"
        content = _map(idx_path(prefix) if index is None else index)
        self.dtype, sequences, entries = _read_header(path, content)
        # Compute with Python's integers, which can't overflow as numpy's can.
        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        modes_at = documents_at + 8 * entries
        if len(content) not in (modes_at, modes_at + sequences):
            raise CorruptCheckpoint(
                f"{path}: has {len(content):,} bytes, {sequences:,} sequences and {entries:,} document entries take {modes_at:,}; "
                "it is truncated, or was written to twice"
            )
        self.lengths: NDArray[np.int32] = np.frombuffer(content, "<i4", sequences, lengths_at)
        self._pointers: NDArray[np.int64] = np.frombuffer(content, "<i8", sequences, pointers_at)
        self.documents: NDArray[np.int64] = np.frombuffer(content, "<i8", entries, documents_at)
        self.modes: NDArray[np.int8] | None = None
        if sequences and len(content) != modes_at:
            self.modes = np.frombuffer(content, "i1", sequences, modes_at)
        self._tokens: TokenFile = _MappedTokens(bin_path(prefix)) if tokens is None else tokens
        self._check()

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Return tokens [offset, offset + length) of a sequence; to its end if length is None."""
        tokens = int(self.lengths[index])
        available = tokens - offset
        count = available if length is None else length
        if offset < 0 or not 0 <= count <= available:
            raise IndexError(
                f"sequence {index} has {tokens} tokens; {count} from {offset} were asked for"
            )
        if not count:
            return np.empty(0, self.dtype)
        skipped = offset * self.dtype.itemsize
        start = int(self._pointers[index]) + skipped
        return np.frombuffer(self._tokens.read(start, count * self.dtype.itemsize), self.dtype)

    def _check(self) -> None:
        """Check that every sequence lies in the .bin and every document in the index.

        The check runs in blocks, because an index may have gigabytes.
        """
        path, size = f"{self.prefix}.idx", len(self._tokens)
        name = path.rpartition("/")[2]
        if (
            not len(self.documents)
            or self.documents[0] != 0
            or self.documents[-1] != len(self.lengths)
        ):
            raise CorruptCheckpoint(
                f"{path}: its document array doesn't run from 0 to its {len(self.lengths):,} sequences; preprocess again"
            )
        for start in range(0, len(self.documents), _BLOCK):
            if np.any(np.diff(self.documents[start : start + _BLOCK + 1]) < 0):
                raise CorruptCheckpoint(
                    f"{path}: its document array goes backwards; preprocess again"
                )
        for start in range(0, len(self.lengths), _BLOCK):
            block = slice(start, start + _BLOCK)
            counts, places = self.lengths[block].astype(np.int64), self._pointers[block]
            # To avoid a sum that could overflow, compare the size with the bytes after the start.
            wrong = (
                (counts < 0)
                | (places < 0)
                | (places > size)
                | (counts * self.dtype.itemsize > size - places)
            )
            if np.any(wrong):
                first = start + int(np.argmax(wrong))
                raise CorruptCheckpoint(
                    f"{self.prefix}.bin: has {size:,} bytes, but {name} puts the {self.lengths[first]:,} tokens of "
                    f"sequence {first:,} at byte {self._pointers[first]:,}; one of the two is truncated or of another dataset"
                )
        if len(self.lengths):
            end = int(self._pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
            if end != size:
                raise CorruptCheckpoint(
                    f"{self.prefix}.bin: has {size:,} bytes, {name} lists {end:,}; they are of two datasets, "
                    "or writing was interrupted"
                )
        elif size:
            raise CorruptCheckpoint(f"{self.prefix}.bin: has {size:,} bytes, {name} lists none")


def _require_files(prefix: str | Path) -> None:
    path = idx_path(prefix)
    for file in (path, bin_path(prefix)):
        if not file.is_file():
            raise CorruptCheckpoint(
                f"{file}: no such file; a dataset is given by its path without .bin or .idx{_meant(path)}"
            )


def _meant(path: Path) -> str:
    """Return a hint if preprocess made datasets of this prefix: preprocess appends the key's name and the level."""
    found = sorted(path.parent.glob(f"{glob.escape(path.stem)}_*.idx"))
    return f"; is {found[0].with_suffix('')} meant?" if found else ""


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                return b""  # mmap refuses an empty file
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if is_limit(error):
            raise limit_reached(path) from error
        raise CorruptCheckpoint(f"{path}: can't be read: {error.strerror}") from error


def _read_header(path: str, index: mmap.mmap | bytes) -> tuple[TokenDtype, int, int]:
    header = index[: HEADER.size]
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        start = MAGIC[:7].decode()
        raise CorruptCheckpoint(
            f"{path}: is not an index of a Megatron dataset: it doesn't start with {start}"
        )
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != VERSION:
        raise CorruptCheckpoint(f"{path}: says version {version}; only {VERSION} is known")
    if code not in DTYPES:
        known = ", ".join(f"{known} {dtype.name}" for known, dtype in sorted(DTYPES.items()))
        raise CorruptCheckpoint(
            f"{path}: its tokens have dtype code {code}; tokens have one of {known}"
        )
    return DTYPES[code], sequences, entries
