"""The checksums by which stores compare what they have with what was sent, and how those of parts make that of an object."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from isal import isal_zlib

_CRC32C = 0x82F63B78
"""The polynomial of CRC-32C, its highest power in the lowest bit."""
_Matrix = tuple[int, ...]
"""A linear map of 32 bits: the image of each bit."""


class Checksum(NamedTuple):
    """A checksum of 32 bits."""

    of: Callable[[bytes | bytearray], int]
    joined: Callable[[int, int, int], int]
    """(checksum of the first bytes, checksum of those behind, number of those behind) -> checksum of all."""


CRC32 = Checksum(isal_zlib.crc32, isal_zlib.crc32_combine)
"""S3's and ours."""


def crc32c() -> Checksum:
    """Google's. Raises ImportError without google-crc32c."""
    import google_crc32c

    return Checksum(lambda content: int(google_crc32c.value(bytes(content))), crc32c_joined)


def crc32c_joined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32C of two contents behind each other. nbytes: length of the second one."""
    return _image(_zeros(nbytes), first) ^ second


@cache
def _zeros(nbytes: int) -> _Matrix:
    """The map of a CRC when `nbytes` zeros follow. All parts of an object but the last have the same length."""
    if nbytes == 1:
        shift = (_CRC32C, *(1 << bit for bit in range(31)))
        return _power_of_two(shift, 3)
    if not nbytes:
        return tuple(1 << bit for bit in range(32))
    half = _zeros(nbytes // 2)
    whole = _after(half, half)
    return _after(_zeros(1), whole) if nbytes % 2 else whole


def _power_of_two(matrix: _Matrix, exponent: int) -> _Matrix:
    for _ in range(exponent):
        matrix = _after(matrix, matrix)
    return matrix


def _after(second: _Matrix, first: _Matrix) -> _Matrix:
    return tuple(_image(second, column) for column in first)


def _image(matrix: _Matrix, vector: int) -> int:
    image, bit = 0, 0
    while vector:
        if vector & 1:
            image ^= matrix[bit]
        vector >>= 1
        bit += 1
    return image
