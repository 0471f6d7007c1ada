"""Weights in FP8 by blocks, as DeepSeek-V3 stores them: float8_e4m3fn, and a float32 scale for each 128 by 128 of a matrix.

    scale = max |x| / 448 of the block in float32, 1 for one of zeros;  q = x / scale, to nearest even;  read as q * scale

A tensor is read twice: for its scales, 128 rows at a time, then for its values. `quantized.py` is the way back. Source:
inference/kernel.py of DeepSeek-V3.
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from threading import Lock

from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, box_blocks, matrix_shape
from megaconv.engine import rounding
from megaconv.engine.assembled import window
from megaconv.errors import NotExpressible
from megaconv.model.ir import TensorInfo

BLOCK = 128
"""Rows and columns that share a scale."""
SCALES = "_scale_inv"
"""Follows a weight's name in that of its scales."""
READ_AS = "bfloat16"
"""What a reader makes of such a weight, unless it is asked for another dtype."""
_LARGEST = 448.0
_AT_ONCE = 1 << 17
"""Elements that arithmetic is done with at a time, so that what lies between two steps of it stays small."""


@dataclass
class Rounding:
    """By how much stored values are off, over all that was read so far; any thread may add to it."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, errors: Floats) -> None:
        largest, squares = float(np.abs(errors).max(initial=0)), float(np.square(errors, dtype=np.float64).sum())
        with self._lock:
            self.largest, self.squares = max(self.largest, largest), self.squares + squares
            self.count += errors.size

    @property
    def rms(self) -> float:
        return sqrt(self.squares / self.count) if self.count else 0.0

    def to_json(self) -> dict[str, float]:
        return {"weights": self.count, "largest_error": self.largest, "rms_error": self.rms}


@dataclass(frozen=True)
class Blocks:
    """A matrix that is to be quantized, with the scales of its blocks."""

    source: LazyTensor
    name: str
    """For messages."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def read(self, box: Box) -> Floats:
        stored = np.empty((box.rows, box.cols * ITEMSIZE[self.source.dtype]), np.uint8)
        self.source.read_into(box, stored)
        numbers = rounding.exact(stored.reshape(-1), self.source.dtype).astype(np.float32)
        return numbers.reshape(box.rows, box.cols)

    @property
    def scales(self) -> Floats:
        """[rows / 128, columns / 128]. Raises NotExpressible for a value that is not finite."""
        with self._lock:
            return self._scales

    @cached_property
    def _scales(self) -> Floats:
        rows, cols = matrix_shape(self.source.shape)
        largest = np.empty(grid(self.source.shape), np.float32)
        for row in range(0, rows, BLOCK):
            for col in range(0, cols, _AT_ONCE // BLOCK):
                box = Box(row, min(row + BLOCK, rows), col, min(col + _AT_ONCE // BLOCK, cols))
                found = np.maximum.reduceat(np.abs(self.read(box)).max(axis=0), range(0, box.cols, BLOCK))
                largest[row // BLOCK, col // BLOCK : col // BLOCK + len(found)] = found
        if not np.isfinite(largest).all():
            raise NotExpressible(f"{self.name}: holds values that are not finite, which FP8 by blocks can't express")
        scales = largest / _LARGEST
        return np.where(scales == 0, np.float32(1), scales)

    def scales_of(self, box: Box) -> Floats:
        """One for each element of a rectangle."""
        rows, cols = np.arange(box.row0, box.row1) // BLOCK, np.arange(box.col0, box.col1) // BLOCK
        return self.scales[rows[:, None], cols]


@dataclass(frozen=True)
class Fp8Values:
    """The values of a matrix, each divided by its block's scale."""

    blocks: Blocks
    errors: Rounding
    dtype: str = "float8_e4m3fn"

    @property
    def shape(self) -> Shape:
        return self.blocks.source.shape

    @property
    def read(self) -> TensorInfo:
        """As a reader gets it."""
        return TensorInfo(self.shape, READ_AS)

    def read_into(self, box: Box, out: Bytes) -> None:
        for part in box_blocks(box, self.dtype, _AT_ONCE):
            numbers, scales = self.blocks.read(part), self.blocks.scales_of(part)
            codes = e4m3(numbers / scales)
            self.errors.add(e4m3_values(codes) * scales - numbers)
            np.copyto(window(out, box, part, 1), codes)

    def as_read(self, box: Box, stored: Bytes) -> Bytes:
        """The bytes that a reader has of a rectangle: what fingerprints are made of."""
        read = np.empty((box.rows, box.cols * ITEMSIZE[READ_AS]), np.uint8)
        for part in box_blocks(box, self.dtype, _AT_ONCE):
            numbers = e4m3_values(window(stored, box, part, 1)) * self.blocks.scales_of(part)
            np.copyto(window(read, box, part, ITEMSIZE[READ_AS]), rounding.rounded(numbers, READ_AS))
        return read


@dataclass(frozen=True)
class Fp8Scales:
    """The scales of a matrix, as a tensor."""

    blocks: Blocks
    dtype: str = "float32"

    @property
    def shape(self) -> Shape:
        return grid(self.blocks.source.shape)

    def read_into(self, box: Box, out: Bytes) -> None:
        part = np.ascontiguousarray(self.blocks.scales[box.row0 : box.row1, box.col0 : box.col1])
        np.copyto(out, part.view(np.uint8))

    def as_read(self, box: Box, stored: Bytes) -> Bytes:
        """Nothing: a reader has no such tensor."""
        return stored[:0]


def grid(shape: Shape) -> tuple[int, int]:
    """How many blocks a matrix has, downwards and across; the last ones may be narrower."""
    rows, cols = matrix_shape(shape)
    return -(-rows // BLOCK), -(-cols // BLOCK)


def e4m3(numbers: Floats) -> Bytes:
    """float8_e4m3fn of finite numbers, to nearest even; what is beyond 448 becomes 448."""
    bits = numbers.view(np.uint32)
    magnitude = np.minimum(np.abs(numbers), _LARGEST)
    of_magnitude = magnitude.view(np.uint32)
    half = (of_magnitude >> 20 & 1) + np.uint32(
        0x7FFFF
    )  # 20 bits of the mantissa go; a tie goes up only from an odd one
    normal = (of_magnitude + half >> 20).astype(np.int32) - (127 - 7 << 3)
    small = np.rint(magnitude * np.float32(512)).astype(np.int32)  # multiples of 2^-9, up to 2^-6
    codes = np.where(magnitude < np.float32(2**-6), small, normal).astype(np.uint8)
    return codes | (bits >> 24 & 0x80).astype(np.uint8)


def e4m3_values(codes: Bytes) -> Floats:
    """What codes of float8_e4m3fn stand for."""
    """Of the codes that `e4m3` makes, and of NaN's."""
    return rounding.numbers(codes, "float8_e4m3fn").astype(np.float32)
