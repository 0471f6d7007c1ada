"""The layout of an output file, complete before its first tensor arrives, so that tensors can be written in any order."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol


class Record(NamedTuple):
    """The place of one tensor's bytes in a file: contiguous, row-major, little-endian."""

    offset: int
    nbytes: int


class FileLayout(Protocol):
    """Everything about one output file that does not depend on the values of its tensors."""

    @property
    def size(self) -> int:
        """Size of the whole file in bytes."""
        ...

    @property
    def records(self) -> Mapping[str, Record]:
        """Key that the planner gave a tensor -> its record."""
        ...

    @property
    def needs_checksums(self) -> bool:
        """True if headers() needs the CRC-32 of every record."""
        ...

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of everything in the file that is not a tensor: headers, directories, metadata.

        checksums: CRC-32 of each record, by key; empty if needs_checksums is False.
        """
        ...


class PlainFile:
    """A small file with known bytes: a configuration, a tracker."""

    records: Mapping[str, Record] = {}
    needs_checksums = False

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.size = len(content)

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        if self.content:
            yield 0, self.content
