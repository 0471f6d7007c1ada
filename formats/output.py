"""An output file that is laid out completely before its first tensor arrives, so that tensors can be written in any order."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol


class Record(NamedTuple):
    """Where the bytes of one tensor lie in a file: contiguous, row-major, little-endian."""

    offset: int
    nbytes: int


class FileLayout(Protocol):
    """Everything about one output file that does not depend on the values of its tensors."""

    @property
    def size(self) -> int:
        """Of the whole file, in bytes."""
        ...

    @property
    def records(self) -> Mapping[str, Record]:
        """By the key that the planner gave each tensor."""
        ...

    @property
    def needs_checksums(self) -> bool:
        """Whether headers() needs the CRC-32 of every record."""
        ...

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of everything in the file that is not a tensor: headers, directories, metadata.

        checksums: CRC-32 of each record, by key; empty when needs_checksums is False.
        """
        ...


class PlainFile:
    """A small file whose bytes are known: a configuration, a tracker."""

    records: Mapping[str, Record] = {}
    needs_checksums = False

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.size = len(content)

    def headers(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        if self.content:
            yield 0, self.content
