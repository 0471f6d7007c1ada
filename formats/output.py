"""The layout of an output file, complete before its first tensor arrives, so that tensors can be written in any order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from formats.partial_files import Span


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


class Piece(NamedTuple):
    """A range of a file that is not a tensor, and the records that have to be complete before its bytes are known."""

    offset: int
    nbytes: int
    needs: tuple[str, ...]
    """The records whose CRC-32 the bytes contain."""
    content: Callable[[Mapping[str, int]], bytes]
    """`content(checksums)`: the bytes. checksums: at least those of the records in `needs`."""


class Unwritten(NamedTuple):
    """The ranges of a file that nobody writes, in order."""

    gaps: Sequence[Span] = ()
    """They stay zero."""
    known: Sequence[Piece] = ()
    """Their bytes are known already."""


def pieces(layout: FileLayout) -> list[Piece]:
    """The headers of a layout as pieces. A layout with checksums has a method `pieces`; the pieces of another one are
    known at once."""
    own = getattr(layout, "pieces", None)
    if own is not None:
        return list(own())
    needs = tuple(layout.records) if layout.needs_checksums else ()
    blank = dict.fromkeys(layout.records, 0)
    found: list[Piece] = []
    for number, (offset, data) in enumerate(layout.headers(blank)):
        known = partial(_nth, layout, number) if needs else partial(_known, data)
        found.append(Piece(offset, len(data), needs, known))
    return found


def _nth(layout: FileLayout, number: int, checksums: Mapping[str, int]) -> bytes:
    return next(
        data for place, (_, data) in enumerate(layout.headers(checksums)) if place == number
    )


def _known(data: bytes, checksums: Mapping[str, int]) -> bytes:
    return data


def whole_content(layout: FileLayout) -> bytes:
    """The bytes of a small file without tensors."""
    content = bytearray(layout.size)
    for offset, data in layout.headers({}):
        content[offset : offset + len(data)] = data
    return bytes(content)


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
