"""blocks.bin of a patch while it grows. The journal lists its finished tensors, so that a killed run continues after them.

{"tensor": [NAME, SLOT, DTYPE, SHAPE, HAS_BASE, [SIZE, ...], HASH], "new": FINGERPRINT, "base": FINGERPRINT or null}
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from blake3 import blake3

from formats.staging import Staging
from megaconv.patches.patch import BLOCKS, Entry, entry_of

JOURNAL_SECONDS = 5.0
"""Seconds between two journal entries. The blocks that they describe are flushed to disk before."""
_READ_BYTES = 1 << 20


class Finished(NamedTuple):
    """A tensor whose blocks are complete."""

    entry: Entry
    new: str
    """The fingerprint of the newer checkpoint's tensor."""
    base: str | None
    """The fingerprint of the base's tensor; None if the blocks don't follow from one."""

    def to_json(self) -> dict[str, Any]:
        """The tensor's line in the journal."""
        return {"tensor": self.entry.to_json(), "new": self.new, "base": self.base}


class BlocksFile:
    """Writes the blocks of all tensors, one after the other. A context manager."""

    def __init__(self, staging: Staging, journal: Sequence[Mapping[str, Any]]) -> None:
        """Open the file behind the tensors that an earlier run has finished. journal: its entries."""
        self._staging, path = staging, staging.data / BLOCKS
        self.kept = list(_intact(path, journal))
        """The tensors that an earlier run has finished, in model order."""
        self._file: BinaryIO = path.open("r+b" if self.kept else "wb")
        self._file.truncate(sum(sum(each.entry.sizes) for each in self.kept))
        self._file.seek(0, os.SEEK_END)
        self._unrecorded: list[Finished] = []
        self._recorded = time.monotonic()

    def __enter__(self) -> "BlocksFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        """Append a block."""
        self._file.write(content)

    def finish(self, tensor: Finished) -> None:
        """Enter a tensor whose blocks were all written."""
        self._unrecorded.append(tensor)
        if time.monotonic() - self._recorded >= JOURNAL_SECONDS * self._staging.journal_pause:
            self.sync()

    def sync(self) -> int:
        """Bring all blocks to the disk, then the journal. Returns the size of the file in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._unrecorded:
            self._staging.record([each.to_json() for each in self._unrecorded])
        self._unrecorded.clear()
        self._recorded = time.monotonic()
        return self._file.tell()


def _intact(path: Path, journal: Sequence[Mapping[str, Any]]) -> Iterator[Finished]:
    """The tensors of a journal whose blocks are on the disk with their hashes, up to the first other one."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in journal:
            entry = entry_of(line["tensor"])
            if _digest(file, sum(entry.sizes)) != entry.digest:
                return
            yield Finished(entry, line["new"], line["base"])


def _digest(file: BinaryIO, size: int) -> str:
    """The hash of the next bytes of a file. Too few bytes have another hash."""
    hasher = blake3()
    while size > 0 and (block := file.read(min(size, _READ_BYTES))):
        hasher.update(block)
        size -= len(block)
    return str(hasher.hexdigest())
