"""Checksums of parts, joined, are those of the whole."""

import random

import pytest

from formats.stores.checksums import CRC32, Checksum, crc32c, crc32c_joined

CHECK = b"123456789"
"""The text whose checksums the catalogues of CRCs list."""
LENGTHS = (0, 1, 2, 7, 8, 255, 256, 4097, (1 << 16) + 3)


def google() -> Checksum:
    pytest.importorskip("google_crc32c")
    return crc32c()


def test_the_checksums_are_those_of_the_catalogues() -> None:
    assert CRC32.of(CHECK) == 0xCBF43926
    assert google().of(CHECK) == 0xE3069283


def test_checksums_are_joined_without_the_library_of_google() -> None:
    """CRC-32C of `1234` and of `56789`, by the definition: bit by bit."""
    assert crc32c_joined(_bit_by_bit(CHECK[:4]), _bit_by_bit(CHECK[4:]), 5) == 0xE3069283


def _bit_by_bit(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("checksum", [lambda: CRC32, google], ids=["crc32", "crc32c"])
def test_the_checksums_of_two_contents_make_that_of_both(checksum: object) -> None:
    of, joined = checksum()  # type: ignore[operator]
    dice = random.Random(4)
    for first in LENGTHS:
        for second in LENGTHS:
            one, two = dice.randbytes(first), dice.randbytes(second)
            assert joined(of(one), of(two), second) == of(one + two), (first, second)
