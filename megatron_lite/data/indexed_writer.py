"""Writes Megatron's indexed datasets (see `indexed`), byte for byte as megatron-core's builder does.

.NAME.bin.partial     in the target's directory during writing, with an exclusive lock
.NAME.idx.partial     written at the end; the index appears last, and without an index there is no dataset
"""

import fcntl
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from formats.errors import TargetExists
from formats.renames import sync_directory
from formats.staged_file import StagedFile, write_error
from megaconv.errors import UsageError
from megatron_lite.data.indexed import (
    CODES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    bin_path,
    idx_path,
)
from megatron_lite.data.tokens import TokenDtype, Tokens

_BUFFER_BYTES = 1 << 20


class IndexedWriter:
    """A context manager that writes a dataset. The dataset appears complete if the block succeeds, and not at all if not.

    Raises TargetExists if there is a dataset and overwrite is not set, or if another run is writing it.
    """

    def __init__(
        self, prefix: str | Path, dtype: TokenDtype, *, modes: bool = False, overwrite: bool = False
    ) -> None:
        """modes: each sequence has a mode, as in multimodal datasets."""
        self.prefix, self.dtype, self._overwrite = str(prefix), dtype, overwrite
        self._targets = (bin_path(prefix), idx_path(prefix))
        self._partial = tuple(path.with_name(f".{path.name}.partial") for path in self._targets)
        self._refuse_existing()
        self._lengths, self._documents = array("i"), array("q", [0])
        self._modes = array("b") if modes else None
        self._lock = _locked(self._partial[0], self._targets[0])
        self._bin = StagedFile(self._partial[0], 0, keep=False)
        self._buffer, self._written = bytearray(), 0

    @property
    def sequences(self) -> int:
        return len(self._lengths)

    @property
    def documents(self) -> int:
        return len(self._documents) - 1

    @property
    def tokens(self) -> int:
        return (self._written + len(self._buffer)) // self.dtype.itemsize

    def add(
        self,
        tokens: Sequence[int] | Tokens,
        lengths: Sequence[int],
        modes: Sequence[int] | None = None,
    ) -> None:
        """Add one document: its tokens, and the number of tokens of each sequence.

        Raises UsageError for a token that the dtype can't hold.
        """
        self.add_encoded(encoded(tokens, self.dtype), [lengths], modes)

    def add_encoded(
        self, data: bytes, documents: Sequence[Sequence[int]], modes: Sequence[int] | None = None
    ) -> None:
        """Add several documents: the bytes of all their tokens, and the lengths of each document's sequences."""
        assert len(data) == self.dtype.itemsize * sum(map(sum, documents)), (
            "lengths and tokens disagree"
        )
        for lengths in documents:
            self._lengths.extend(lengths)
            self._documents.append(len(self._lengths))
        if self._modes is not None:
            self._modes.extend(modes if modes is not None else [0] * sum(map(len, documents)))
        self._append(data)

    def add_dataset(self, prefix: str | Path) -> None:
        """Add all documents of another dataset, like Megatron's tools/merge_datasets.py.

        Raises UsageError if its tokens have another dtype, or if only one of the two datasets has modes.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise UsageError(
                f"{prefix}: its tokens are {other.dtype.name}, those of {self.prefix} {self.dtype.name}; "
                "datasets of two vocabularies can't be merged"
            )
        if self._modes is not None or other.modes is not None:
            if self._modes is None or other.modes is None:
                raise UsageError(f"{prefix}: multimodal and other datasets can't be merged")
            self._modes.frombytes(other.modes.tobytes())
        self._documents.frombytes((other.documents[1:] + self.sequences).tobytes())
        self._lengths.frombytes(other.lengths.tobytes())
        for index in range(len(other)):
            self._append(other.get(index).tobytes())

    def _append(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._bin.write(self._written, bytes(self._buffer))
        self._written += len(self._buffer)
        self._buffer.clear()

    def commit(self) -> None:
        """Flush both files to disk and rename them to their targets. An old index is removed before its .bin is replaced."""
        self._flush()
        self._bin.sync()
        self._write_index()
        self._refuse_existing()
        self._targets[1].unlink(missing_ok=True)
        for partial, target in zip(self._partial, self._targets, strict=True):
            partial.rename(target)
        sync_directory(self._targets[0].parent)
        self._close()

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, "<i4") if self._lengths else np.empty(0, "<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        starts = np.zeros(len(lengths), "<i8")
        starts[1:] = ends[:-1]
        code = CODES[self.dtype]
        header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._documents))
        modes = b"" if self._modes is None else self._modes.tobytes()
        documents = self._documents.tobytes()
        data = b"".join((header, lengths.tobytes(), starts.tobytes(), documents, modes))
        index = StagedFile(self._partial[1], 0, keep=False)
        try:
            index.write(0, data)
            index.sync()
        finally:
            index.close()

    def discard(self) -> None:
        """Remove the partial files. Existing datasets stay."""
        for path in self._partial:
            path.unlink(missing_ok=True)
        self._close()

    def _refuse_existing(self) -> None:
        for path in self._targets:
            if path.exists() and not self._overwrite:
                raise TargetExists(
                    f"{path}: already exists; choose another prefix, or give --overwrite to replace it"
                )

    def _close(self) -> None:
        self._bin.close()
        os.close(self._lock)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.commit()
        except BaseException:
            self.discard()
            raise


def encoded(tokens: Sequence[int] | Tokens, dtype: TokenDtype) -> bytes:
    """Return the bytes of tokens in the file. Raises UsageError for a token that the dtype can't hold."""
    array_, bounds = np.asarray(tokens, dtype=np.int64), np.iinfo(dtype)
    if array_.size and (array_.min() < bounds.min or array_.max() > bounds.max):
        worst = array_.min() if array_.min() < bounds.min else array_.max()
        raise UsageError(
            f"token {worst} doesn't fit {dtype.name}, which the size of the vocabulary asks for"
        )
    return array_.astype(dtype).tobytes()


def _locked(path: Path, target: Path) -> int:
    """Lock the file until the process ends or closes it, so that two runs never write one file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise write_error(error, target) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise TargetExists(f"{target}: another run is writing it just now") from None
    return descriptor
