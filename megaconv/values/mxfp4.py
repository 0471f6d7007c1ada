"""Quantizes weights to MXFP4 as GPT-OSS has them: 4 bits each, and a power of two per 32 elements of a row.

    exponent = floor(log2(max |x| of the 32)) - 2, from -127 (also for zeros); stored as exponent + 127
    code = x / 2 ^ exponent to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, a tie to the even code; larger values become 6;
           8 more where x has a sign, also that of a negative zero

Each 32 elements become 16 bytes, even columns in the low four bits. This is the conversion of the OCP Microscaling Formats
specification 1.0, section 6.3. A value that comes from MXFP4 stays the same: a block with small codes gets a smaller
exponent and larger codes, and every product is exact in bfloat16. `four_bits.py` is the inverse.
"""

from dataclasses import dataclass

from formats.lazy_numpy import Floats, np
from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape, reshaped
from megaconv.errors import NotExpressible
from megaconv.values.code_tensors import Codes, Quantized, Rounding, Scales, largest_of_groups
from megaconv.values.four_bits import MXFP4_GROUP, fp4_pairs, powers
from megaconv.values.nvfp4 import e2m1
from megaconv.values.scaled import read_floats

BLOCK_BYTES = MXFP4_GROUP // 2
"""Bytes of the codes of a block."""
_LEAST, _BIAS = -127, 127
_OF_LARGEST_CODE = 2
"""The exponent of the largest code: 6 = 1.5 * 2 ^ 2."""


@dataclass(frozen=True)
class Blocks:
    """A matrix to be quantized, as blocks of 32 elements in row-major order."""

    source: LazyTensor
    name: str
    """The tensor's name for messages."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, blocks of a row)."""
        rows, cols = matrix_shape(self.source.shape)
        return rows, cols // MXFP4_GROUP

    def numbers(self, first: int, last: int) -> Floats:
        """The numbers [blocks, 32] of a range of blocks."""
        rows, cols = matrix_shape(self.source.shape)
        # A range of blocks is a range of elements, which begins and ends in the middle of rows.
        line = reshaped(self.source, (1, rows * cols))
        box = Box(0, 1, first * MXFP4_GROUP, last * MXFP4_GROUP)
        return read_floats(line, box).reshape(-1, MXFP4_GROUP)

    def exponents(self, numbers: Floats) -> Bytes:
        """The stored exponents of blocks. Raises NotExpressible for a value that isn't finite."""
        largest = largest_of_groups(numbers)[:, 0]
        if not np.isfinite(largest).all():
            raise NotExpressible(
                f"{self.name}: holds values that are not finite, which MXFP4 can't express"
            )
        # frexp gives fractions from 0.5 to 1, so that its exponent is one more than that of the logarithm.
        found = np.frexp(largest)[1] - 1 - _OF_LARGEST_CODE
        found = np.where(largest == 0, _LEAST, found)
        stored: Bytes = (np.maximum(found, _LEAST) + _BIAS).astype(np.uint8)
        return stored


@dataclass(frozen=True)
class Mxfp4Codes(Codes):
    """The codes as a tensor [rows, cols / 32, 16], two codes in each byte."""

    blocks: Blocks
    errors: Rounding
    dtype: str = "uint8"
    bits: int = 4
    group: int = MXFP4_GROUP

    @property
    def source(self) -> LazyTensor:
        return self.blocks.source

    @property
    def shape(self) -> Shape:
        return (*self.blocks.shape, BLOCK_BYTES)

    def quantized(self, box: Box) -> Quantized:
        # A row of codes is a block.
        numbers = self.blocks.numbers(box.row0, box.row1)
        exponents = self.blocks.exponents(numbers)
        codes = _packed(numbers, exponents)
        values = _values(codes, exponents)
        return Quantized(codes, values, values - numbers)


@dataclass(frozen=True)
class Mxfp4Exponents(Scales):
    """The exponents as a tensor [rows, cols / 32]."""

    blocks: Blocks
    dtype: str = "uint8"
    group: int = MXFP4_GROUP

    @property
    def shape(self) -> Shape:
        return self.blocks.shape

    def scales(self, box: Box) -> Bytes:
        numbers = read_floats(self.blocks.source, box).reshape(-1, MXFP4_GROUP)
        return self.blocks.exponents(numbers).reshape(box.rows, -1)


def _packed(numbers: Floats, exponents: Bytes) -> Bytes:
    """The codes [blocks, 16] of numbers [blocks, 32]."""
    quotients = np.ldexp(numbers, _BIAS - exponents.astype(np.int32)[:, None])
    pairs = signed_e2m1(quotients).reshape(len(numbers), BLOCK_BYTES, 2)
    low, high = pairs[:, :, 0], pairs[:, :, 1] << np.uint8(4)
    return low | high


def signed_e2m1(numbers: Floats) -> Bytes:
    """The 4-bit codes of numbers, one per byte. A negative zero has a code of its own."""
    codes = e2m1(np.abs(numbers))
    codes |= np.signbit(numbers).astype(np.uint8) << np.uint8(3)
    return codes


def _values(packed: Bytes, exponents: Bytes) -> Floats:
    """The numbers [blocks, 2 * bytes] that bytes of codes stand for."""
    values = fp4_pairs()[packed].reshape(len(packed), -1)
    values *= powers()[exponents][:, None]
    return values
