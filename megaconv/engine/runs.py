"""The ranges of bytes that were written into a record: they have to cover it exactly once."""

from typing import NamedTuple

from isal import isal_zlib

from megaconv.errors import CheckpointError


class Run(NamedTuple):
    """A contiguous range of bytes that was written into a record."""

    offset: int
    nbytes: int
    crc: int


def total(runs: list[Run], size: int, checksummed: bool, what: str) -> int:
    """CRC-32 of a whole record, from the checksums of its runs.

    Raises CheckpointError unless they cover it exactly once.

    Without checksums, a run may stand for a rectangle, and only the number of bytes is compared.
    """
    position = crc = 0
    for run in sorted(runs):
        if checksummed and run.offset != position:
            raise CheckpointError(
                f"{what}: bytes {min(position, run.offset)} to {max(position, run.offset)} were written twice or never; please report this",
                code="internal-error",
            )
        crc = isal_zlib.crc32_combine(crc, run.crc, run.nbytes)
        position += run.nbytes
    if position != size:
        raise CheckpointError(
            f"{what}: {position} of {size} bytes were written; please report this",
            code="internal-error",
        )
    return crc


def zeros(offset: int, nbytes: int) -> Run:
    """The run of a stretch that stays zero."""
    return Run(offset, nbytes, isal_zlib.crc32(bytes(nbytes)))
