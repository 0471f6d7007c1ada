"""Weights in NVFP4 as ModelOpt exports them: 4 bits each, a float8_e4m3fn scale for each 16 of a row, and a float32 one of all.

    scale_2 = max |x| / (6 * 448) of all;  scale = e4m3(max |x| of the 16 / (6 * scale_2)), 1 for zeros, 2^-9 or more
    code = x / (scale * scale_2) to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, a tie to the even code; 8 more where x < 0

All of it in float32; even columns are the low four bits. Inference engines join q, k and v, gate and up, and the experts of a layer,
and have one scale_2 for what they join: the largest value of any of them makes it. A tensor is read three times: for that value,
for its scales and for its codes. `quantized.py` is the way back. Source: nvfp4_tensor.py of ModelOpt 0.47.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, box_blocks, matrix_shape
from megaconv.engine import rounding
from megaconv.engine.assembled import window
from megaconv.engine.fp8_blocks import READ_AS, Rounding, e4m3, e4m3_values
from megaconv.errors import NotExpressible
from megaconv.model.ir import TensorInfo

GROUP = 16
"""Elements of a row that share a scale."""
SCALES, SCALE_2 = "_scale", "_scale_2"
"""Follow a weight's name in those of its scales."""
_LARGEST, _LARGEST_SCALE, _LEAST_SCALE = 6.0, 448.0, 2.0**-9
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AT_ONCE = 1 << 17
"""Elements that arithmetic is done with at a time."""


@dataclass
class Joined:
    """Matrices that have one scale_2, by their names."""

    members: Sequence[tuple[str, LazyTensor]]
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def scale(self) -> "np.float32":
        """Raises NotExpressible for a value that is not finite."""
        with self._lock:
            return self._scale

    @cached_property
    def _scale(self) -> "np.float32":
        largest = np.float32(0)
        for name, tensor in self.members:
            rows, cols = matrix_shape(tensor.shape)
            for box in box_blocks(Box(0, rows, 0, cols), tensor.dtype, _AT_ONCE * ITEMSIZE[tensor.dtype]):
                found = np.abs(_read(tensor, box)).max(initial=0)
                if not np.isfinite(found):
                    raise NotExpressible(f"{name}: holds values that are not finite, which NVFP4 can't express")
                largest = max(largest, found)
        return np.float32(largest / (_LARGEST * _LARGEST_SCALE)) or np.float32(1)


@dataclass(frozen=True)
class Groups:
    """A matrix that is to be quantized, with what it is joined with."""

    source: LazyTensor
    joined: Joined

    def numbers_and_codes(self, box: Box) -> tuple[Floats, Bytes]:
        """([rows, groups, 16] values, [rows, groups] codes of their scales) of a rectangle of whole groups."""
        numbers = _read(self.source, box).reshape(box.rows, -1, GROUP)
        scales = np.abs(numbers).max(axis=2) / (_LARGEST * self.joined.scale)
        scales = np.where(scales == 0, np.float32(1), scales).clip(_LEAST_SCALE, _LARGEST_SCALE)
        return numbers, e4m3(scales)

    def scale_of(self, codes: Bytes) -> Floats:
        """What the values of each group are multiplied with when they are read."""
        return e4m3_values(codes) * self.joined.scale


@dataclass(frozen=True)
class Fp4Values:
    """[rows, cols / 2] of two codes a byte."""

    groups: Groups
    errors: Rounding
    dtype: str = "uint8"

    @property
    def shape(self) -> Shape:
        rows, cols = matrix_shape(self.groups.source.shape)
        return rows, cols // 2

    @property
    def read(self) -> TensorInfo:
        """As a reader gets it."""
        return TensorInfo(self.groups.source.shape, READ_AS)

    def read_into(self, box: Box, out: Bytes) -> None:
        for part, whole in _parts(box):
            numbers, scales = self.groups.numbers_and_codes(whole)
            factor = self.groups.scale_of(scales)[:, :, None]
            codes = e2m1(numbers / factor)
            self.errors.add(_e2m1_values(codes) * factor - numbers)
            pairs = codes.reshape(whole.rows, -1, 2)
            packed = pairs[:, :, 0] | pairs[:, :, 1] << 4
            first = part.col0 - whole.col0 // 2
            np.copyto(window(out, box, part, 1), packed[:, first : first + part.cols])

    def as_read(self, box: Box, stored: Bytes) -> Bytes:
        """The bytes that a reader has of a rectangle: what fingerprints are made of."""
        size = ITEMSIZE[READ_AS]
        read = np.empty((box.rows, box.cols * 2 * size), np.uint8)
        for part, whole in _parts(box):
            scales = self.groups.scale_of(self.groups.numbers_and_codes(whole)[1])
            packed = window(stored, box, part, 1)
            codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(part.rows, -1)
            columns = (np.arange(2 * part.col0, 2 * part.col1) - whole.col0) // GROUP
            numbers = _e2m1_values(codes) * scales[:, columns]
            at = slice((part.col0 - box.col0) * 2 * size, (part.col1 - box.col0) * 2 * size)
            read[part.row0 - box.row0 : part.row1 - box.row0, at] = rounding.rounded(numbers, READ_AS)
        return read


@dataclass(frozen=True)
class Fp4Scales:
    """[rows, cols / 16]."""

    groups: Groups
    dtype: str = "float8_e4m3fn"

    @property
    def shape(self) -> Shape:
        return scales_shape(self.groups.source.shape)

    def read_into(self, box: Box, out: Bytes) -> None:
        for part in box_blocks(box, self.dtype, _AT_ONCE // GROUP):
            whole = Box(part.row0, part.row1, part.col0 * GROUP, part.col1 * GROUP)
            np.copyto(window(out, box, part, 1), self.groups.numbers_and_codes(whole)[1])

    def as_read(self, box: Box, stored: Bytes) -> Bytes:
        """Nothing: a reader has no such tensor."""
        return stored[:0]


@dataclass(frozen=True)
class Fp4Scale2:
    """One number, a tensor without axes."""

    joined: Joined
    dtype: str = "float32"
    shape: Shape = ()

    def read_into(self, box: Box, out: Bytes) -> None:
        np.copyto(out, np.array([[self.joined.scale]], np.float32).view(np.uint8))

    def as_read(self, box: Box, stored: Bytes) -> Bytes:
        """Nothing: a reader has no such tensor."""
        return stored[:0]


def scales_shape(shape: Shape) -> Shape:
    rows, cols = matrix_shape(shape)
    return rows, cols // GROUP


def e2m1(numbers: Floats) -> Bytes:
    """Codes of 4 bits, a byte each."""
    magnitude = np.abs(numbers)
    bounds = np.array(_BOUNDS, np.float32)
    codes: Bytes = np.searchsorted(bounds, magnitude).astype(np.uint8)  # how many bounds are smaller
    for odd in bounds[1:6:2]:
        codes += magnitude == odd
    codes += (numbers < 0).astype(np.uint8) * np.uint8(8)
    return codes


def _e2m1_values(codes: Bytes) -> Floats:
    values: Floats = np.array(_VALUES, np.float32)[codes & 7]
    values[(codes & 8).astype(bool)] *= -1
    values += np.float32(0)  # a reader has no minus zero
    return values


def _parts(box: Box) -> "list[tuple[Box, Box]]":
    """Blocks of a rectangle of bytes, each with the rectangle of elements that holds its groups whole."""
    half = GROUP // 2
    return [
        (part, Box(part.row0, part.row1, part.col0 // half * GROUP, -(-part.col1 // half) * GROUP))
        for part in box_blocks(box, "uint8", _AT_ONCE // 2)
    ]


def _read(tensor: LazyTensor, box: Box) -> Floats:
    stored = np.empty((box.rows, box.cols * ITEMSIZE[tensor.dtype]), np.uint8)
    tensor.read_into(box, stored)
    return rounding.exact(stored.reshape(-1), tensor.dtype).astype(np.float32).reshape(box.rows, box.cols)
