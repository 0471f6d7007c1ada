"""Quantizes weights to FP8 by blocks as in DeepSeek-V3: float8_e4m3fn, with a float32 scale per 128 by 128 block.

    scale = max |x| / 448 of the block in float32, 1 for one of zeros;  q = x / scale, to nearest even;  read as q * scale

A tensor is read twice: for its scales, 128 rows at a time, then for its values. `quantized.py` is the inverse. Source:
inference/kernel.py of DeepSeek-V3.
"""

from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any, Protocol

from formats.lazy_numpy import Floats, np
from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.errors import NotExpressible
from megaconv.values import rounding
from megaconv.values.code_tensors import AT_ONCE, Codes, Quantized, Rounding, Unread
from megaconv.values.scaled import read_floats

BLOCK = 128
"""Rows and columns that share a scale."""
SCALES = "_scale_inv"
"""The suffix of the scales' name after the weight's name."""
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


@dataclass(frozen=True)
class Blocks:
    """A matrix to be quantized, with the scales of its blocks."""

    source: LazyTensor
    name: str
    """The tensor's name for messages."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def read(self, box: Box) -> Floats:
        return read_floats(self.source, box)

    @property
    def scales(self) -> Floats:
        """The scales [rows / 128, columns / 128]. Raises NotExpressible for a value that isn't finite."""
        with self._lock:
            return self._scales

    @cached_property
    def _scales(self) -> Floats:
        rows, cols = matrix_shape(self.source.shape)
        largest = np.empty(grid(self.source.shape), np.float32)
        step = AT_ONCE // BLOCK
        for row in range(0, rows, BLOCK):
            for col in range(0, cols, step):
                box = Box(row, min(row + BLOCK, rows), col, min(col + step, cols))
                of_columns = np.abs(self.read(box)).max(axis=0)
                of_blocks = np.maximum.reduceat(of_columns, range(0, box.cols, BLOCK))
                first = col // BLOCK
                largest[row // BLOCK, first : first + len(of_blocks)] = of_blocks
        if not np.isfinite(largest).all():
            raise NotExpressible(
                f"{self.name}: holds values that are not finite, which FP8 by blocks can't express"
            )
        scales = largest / LARGEST
        return np.where(scales == 0, np.float32(1), scales)

    def scales_of(self, box: Box) -> Floats:
        """The scale of each element of a rectangle."""
        rows, cols = np.arange(box.row0, box.row1) // BLOCK, np.arange(box.col0, box.col1) // BLOCK
        return self.scales[rows[:, None], cols]


class ScaledMatrix(Protocol):
    """A matrix to be quantized to FP8, with its scales."""

    @property
    def source(self) -> LazyTensor:
        """The matrix."""
        ...

    def read(self, box: Box) -> Floats:
        """The numbers of a rectangle."""
        ...

    def scales_of(self, box: Box) -> Floats:
        """The scale of each element of a rectangle, or an array that broadcasts to it."""
        ...


@dataclass(frozen=True)
class Fp8Values(Codes):
    """The values of a matrix, each divided by its scale."""

    blocks: ScaledMatrix
    errors: Rounding
    dtype: str = "float8_e4m3fn"
    bits: int = 8
    group: int = 1

    @property
    def source(self) -> LazyTensor:
        return self.blocks.source

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def quantized(self, box: Box) -> Quantized:
        numbers, scales = self.blocks.read(box), self.blocks.scales_of(box)
        codes = e4m3(numbers / scales)
        values = e4m3_values(codes) * scales
        return Quantized(codes, values, values - numbers)


@dataclass(frozen=True)
class Fp8Scales(Unread):
    """The scales of a matrix, as a tensor."""

    blocks: Blocks
    dtype: str = "float32"

    @property
    def shape(self) -> Shape:
        return grid(self.blocks.source.shape)

    def read_into(self, box: Box, out: Bytes) -> None:
        part = np.ascontiguousarray(self.blocks.scales[box.row0 : box.row1, box.col0 : box.col1])
        np.copyto(out, part.view(np.uint8))


def grid(shape: Shape) -> tuple[int, int]:
    """The number of blocks of a matrix, (down, across). The last blocks may be smaller."""
    rows, cols = matrix_shape(shape)
    return -(-rows // BLOCK), -(-cols // BLOCK)


def e4m3(numbers: Floats) -> Bytes:
    """float8_e4m3fn codes of finite numbers, rounded to nearest even. Magnitudes above 448 become 448."""
    magnitude = np.minimum(np.abs(numbers), LARGEST)
    # Subnormal codes are multiples of 2^-9, up to 2^-6.
    subnormal = np.rint(magnitude * np.float32(512)).astype(np.int32)
    is_subnormal = magnitude < np.float32(2**-6)
    codes = np.where(is_subnormal, subnormal, _normal_codes(magnitude))
    sign = (numbers.view(np.uint32) >> 24 & 0x80).astype(np.uint8)
    return codes.astype(np.uint8) | sign


def _normal_codes(magnitude: Floats) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """The codes of numbers from 2^-6 to 448."""
    bits = magnitude.view(np.uint32)
    # Drop 20 bits of the mantissa; a tie rounds up only from an odd one.
    is_odd = bits >> 20 & 1
    half = is_odd + np.uint32(0x7FFFF)
    kept_bits = (bits + half >> 20).astype(np.int32)
    return kept_bits - (127 - 7 << 3)


def e4m3_values(codes: Bytes) -> Floats:
    """The values of float8_e4m3fn codes: those that `e4m3` produces, and NaN."""
    return rounding.numbers(codes, "float8_e4m3fn").astype(np.float32)
