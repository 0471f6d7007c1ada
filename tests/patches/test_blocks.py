"""The bytes of a block, and that reading is the inverse of writing."""

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megaconv.patches.blocks import SAME, SPARSE, WHOLE, XOR, decode, encode


def bytes_of(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def test_equal_bytes_take_one_byte() -> None:
    rows = np.arange(64, dtype=np.uint8)
    assert encode(rows, rows.copy(), 2) == bytes([SAME])


def test_literal_bytes_of_each_form() -> None:
    new, base = bytes_of(1, 2, 3, 4), bytes_of(1, 2, 3, 5)
    block = encode(new, base, 2)
    assert block[0] == XOR
    assert zstandard.ZstdDecompressor().decompress(block[1:]) == bytes([0, 0, 0, 1])  # byte planes
    block = encode(new, None, 2)
    assert block[0] == WHOLE
    assert zstandard.ZstdDecompressor().decompress(block[1:]) == bytes([1, 3, 2, 4])
    random = np.random.default_rng(1)
    base = random.integers(0, 256, 1 << 14, np.uint8)
    new = base.copy()
    new[[200, 9000]] ^= 0x55
    block = encode(new, base, 2)
    if block[0] == SPARSE:
        assert block[1:5] == (2).to_bytes(4, "little")
        content = zstandard.ZstdDecompressor().decompress(block[5:])
        first, distance = 100, 4500 - 100
        assert content[:8] == bytes([first, distance & 255, 0, distance >> 8, 0, 0, 0, 0])


@given(
    st.integers(1, 8),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_reading_is_the_inverse_of_writing(
    itemsize: int, elements: int, changes: int, seed: int, has_base: bool
) -> None:
    random = np.random.default_rng(seed)
    new = random.integers(0, 256, elements * itemsize, np.uint8)
    base = new.copy()
    for _ in range(changes if elements else 0):
        base[random.integers(len(base))] ^= random.integers(256)
    given_base = base if has_base else None
    block = encode(new, given_base, itemsize)
    assert np.array_equal(decode(block, given_base, itemsize, len(new)), new)


@pytest.mark.parametrize("form", range(7))
def test_damaged_blocks_are_refused(form: int) -> None:
    base = np.zeros(64, np.uint8)
    too_much = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    for content in (b"", b"\0" * 10, too_much, b"\xff\xff\xff\xff" + too_much):
        if form == SAME:
            continue
        with pytest.raises(ValueError, match="block"):
            decode(bytes([form]) + content, base, 2, 64)
