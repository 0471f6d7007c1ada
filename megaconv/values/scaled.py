"""Dequantizes a matrix of 8-bit or 4-bit numbers, each of whose blocks has a scale. All arithmetic is numpy's.

    value = (code - the zero point of its block) * the scale of its block (* the scale of its column)

Products are computed in float32 and then rounded to nearest even.
"""

from dataclasses import dataclass
from functools import cache

from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.values.rounding import exact, rounded


@dataclass(frozen=True)
class ScaledTensor:
    """A matrix [rows, cols] of float8_e4m3fn or int8, with a scale for each block of rows and columns."""

    values: LazyTensor
    scales: LazyTensor
    """[blocks down, blocks across]. The last blocks may be smaller."""
    block: tuple[int, int]
    dtype: str
    of_columns: LazyTensor | None = None
    """[cols]: one more factor for each column; None: no factor."""
    zero_points: LazyTensor | None = None
    """[blocks down, blocks across] int8: the code of the value 0; None: code 0."""

    @property
    def shape(self) -> Shape:
        return self.values.shape

    def read_into(self, box: Box, out: Bytes) -> None:
        codes = read_bytes(self.values, box)
        is_fp8 = self.values.dtype == "float8_e4m3fn"
        values = fp8_values()[codes] if is_fp8 else codes.view(np.int8).astype(np.float32)
        if self.zero_points is not None:
            values -= self._of_blocks(self.zero_points, box)
        values *= self._of_blocks(self.scales, box)
        if self.of_columns is not None:
            values *= read_floats(self.of_columns, Box(0, 1, box.col0, box.col1))
        np.copyto(out, rounded(values, self.dtype))

    def _of_blocks(self, numbers: LazyTensor, box: Box) -> Floats:
        """The number that belongs to each element of a rectangle. numbers: [blocks down, blocks across]."""
        block_rows, block_cols = self.block
        overlapping = Box(
            row0=box.row0 // block_rows,
            row1=-(-box.row1 // block_rows),
            col0=box.col0 // block_cols,
            col1=-(-box.col1 // block_cols),
        )
        of_blocks = read_floats(numbers, overlapping)
        rows = np.arange(box.row0, box.row1) // block_rows - overlapping.row0
        cols = np.arange(box.col0, box.col1) // block_cols - overlapping.col0
        return of_blocks[rows][:, cols]


@dataclass(frozen=True)
class NibbleRows:
    """A matrix [rows, cols] of int8 numbers from -8 to 7, of which a byte holds two: row 2i in its low four bits."""

    values: LazyTensor
    """[rows / 2, cols] bytes."""
    dtype: str = "int8"

    @property
    def shape(self) -> Shape:
        half, cols = matrix_shape(self.values.shape)
        return 2 * half, cols

    def read_into(self, box: Box, out: Bytes) -> None:
        first, last = box.row0 // 2, -(-box.row1 // 2)
        pairs = read_bytes(self.values, Box(first, last, box.col0, box.col1)).view(np.int8)
        codes = np.empty((2 * (last - first), box.cols), np.int8)
        codes[0::2] = pairs << 4 >> 4  # an arithmetic shift to the right keeps the sign
        codes[1::2] = pairs >> 4
        np.copyto(out, codes[box.row0 - 2 * first : box.row1 - 2 * first].view(np.uint8))


def read_bytes(tensor: LazyTensor, box: Box, itemsize: int = 1) -> Bytes:
    """The bytes of a rectangle: uint8 [rows, cols * itemsize]."""
    found = np.empty((box.rows, box.cols * itemsize), np.uint8)
    tensor.read_into(box, found)
    return found


def read_floats(tensor: LazyTensor, box: Box) -> Floats:
    """The numbers of a rectangle of int8 or of any floating-point dtype: float32 [rows, cols]."""
    stored = read_bytes(tensor, box, ITEMSIZE[tensor.dtype])
    if tensor.dtype == "int8":
        return stored.view(np.int8).astype(np.float32)
    if tensor.dtype == "float8_e8m0fnu":
        return powers_of_two()[stored]
    return exact(stored.reshape(-1), tensor.dtype).astype(np.float32).reshape(box.rows, box.cols)


@cache
def powers_of_two() -> Floats:
    """2 ^ (code - 127) of all 256 float8_e8m0fnu codes. The last code is a NaN."""
    codes = np.arange(255)
    return np.append(np.ldexp(1.0, codes - 127), np.nan).astype(np.float32)


@cache
def fp8_values() -> Floats:
    """The values of all 256 float8_e4m3fn codes.

    A code has a sign, 4 bits of exponent (bias 7) and 3 bits of mantissa. There is no infinity, and one NaN of either
    sign.
    """
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent > 0, normal, np.ldexp(mantissa / 8, -6)) * np.where(
        code > 127, -1, 1
    )
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)
