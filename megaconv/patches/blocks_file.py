"""blocks.bin of a patch while it grows. The journal lists its finished tensors, so that a killed run continues after them.

{"tensor": [NAME, SLOT, DTYPE, SHAPE, HAS_BASE, [SIZE, ...], HASH], "new": FINGERPRINT, "base": FINGERPRINT or null}
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from blake3 import blake3

from formats.staging import Staging
from formats.target import Target
from megaconv.patches.patch import BLOCKS, Entry, entry_of

JOURNAL_SECONDS = 5.0
"""Seconds between two journal entries. The blocks that they describe are on the disk, or in the store, before."""
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

    def __init__(
        self, staging: Target, journal: Sequence[Mapping[str, Any]], most_bytes: int
    ) -> None:
        """Open the file behind the tensors that an earlier run has finished.

        journal: the entries of that run. most_bytes: the largest possible size of the file.
        """
        self._staging = staging
        self._file = staging.grow(BLOCKS, most_bytes)
        kept = list(_intact(staging, journal))
        if not self._file.resume(sum(sum(each.entry.sizes) for each in kept)):
            kept = []
        self.kept = kept
        """The tensors that an earlier run has finished, in model order."""
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
            self._record()

    def end(self) -> int:
        """Bring everything to where it stays. Nothing is written after this call. Returns the size of the file in bytes."""
        self._record()
        self._file.finish()
        return self._file.size

    def _record(self) -> None:
        """Enter the finished tensors into the journal, after their blocks survive the end of this process."""
        self._file.sync()
        if self._unrecorded:
            self._staging.record([each.to_json() for each in self._unrecorded])
        self._unrecorded.clear()
        self._recorded = time.monotonic()


def _intact(staging: Target, journal: Sequence[Mapping[str, Any]]) -> Iterator[Finished]:
    """The tensors of a journal whose blocks are there.

    On a disk, the blocks are compared with their hashes. A store has compared the checksums of parts.
    """
    found = [Finished(entry_of(line["tensor"]), line["new"], line["base"]) for line in journal]
    if not isinstance(staging, Staging):
        yield from found
        return
    path = staging.data / BLOCKS
    if path.is_file():
        with path.open("rb") as file:
            yield from _with_their_hashes(file, found)


def _with_their_hashes(file: BinaryIO, tensors: Sequence[Finished]) -> Iterator[Finished]:
    """The tensors whose blocks follow each other in a file, up to the first with other bytes."""
    for tensor in tensors:
        if _digest(file, sum(tensor.entry.sizes)) != tensor.entry.digest:
            return
        yield tensor


def _digest(file: BinaryIO, size: int) -> str:
    """The hash of the next bytes of a file. Too few bytes have another hash."""
    hasher = blake3()
    while size > 0 and (block := file.read(min(size, _READ_BYTES))):
        hasher.update(block)
        size -= len(block)
    return str(hasher.hexdigest())
