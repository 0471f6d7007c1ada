"""The parts of ggml's blocks: float16 factors, and codes of a few bits that share bytes."""

from formats.lazy_numpy import Floats, np
from formats.tensor import Bytes

HALF = 2
"""Bytes of a float16."""


def halves(stored: Bytes) -> Floats:
    """[blocks, 2] bytes of a float16 -> [blocks, 1] float32."""
    return np.ascontiguousarray(stored).view(np.float16).astype(np.float32)


def nibbles(packed: Bytes, run: int) -> Bytes:
    """[blocks, bytes] -> [blocks, 2 * bytes / run, run]: each `run` bytes hold their low codes, then their high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    codes: Bytes = np.concatenate([runs & 15, runs >> 4], axis=2)
    return codes.reshape(len(packed), -1, run)


def pairs_of_bits(packed: Bytes, run: int) -> Bytes:
    """[blocks, bytes] -> [blocks, 4 * bytes / run, run]: each `run` bytes hold four codes a byte, the lowest bits first."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes: Bytes = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8(3)
    return codes.reshape(len(packed), -1, run)


def single_bits(packed: Bytes) -> Bytes:
    """[blocks, bytes] -> [blocks, 8 * bytes]: the bits of each byte, the lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")
