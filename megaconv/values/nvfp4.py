"""Quantizes weights to NVFP4 as ModelOpt does: 4 bits each, a scale per 16 elements of a row, and a scale of all.

    scale_2 = max |x| / (6 * 448) of all;  scale = e4m3(max |x| of the 16 / (6 * scale_2)), 1 for zeros, 2^-9 or more
    code = x / (scale * scale_2) to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, a tie to the even code; 8 more where x < 0

The scales are float8_e4m3fn, scale_2 is float32; all arithmetic is in float32. Even columns are the low four bits.
Inference engines fuse q, k and v, gate and up, and the experts of a layer. Fused matrices share one scale_2, which the
largest value of any of them determines. A tensor is read three times: for that value, for its scales and for its codes.
`quantized.py` is the inverse. Source: nvfp4_tensor.py of ModelOpt 0.47.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, box_blocks, matrix_shape
from megaconv.errors import NotExpressible
from megaconv.model.assembled import window
from megaconv.model.ir import TensorInfo
from megaconv.values import rounding
from megaconv.values.four_bits import nvfp4_pairs
from megaconv.values.fp8_blocks import READ_AS, Rounding, e4m3, e4m3_values, largest_of_groups

GROUP = 16
"""Elements of a row that share a scale."""
SCALES, SCALE_2 = "_scale", "_scale_2"
"""The suffixes of the scales' names after the weight's name."""
_LARGEST, _LARGEST_SCALE, _LEAST_SCALE = 6.0, 448.0, 2.0**-9
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_AT_ONCE = 1 << 17
"""Elements per step of arithmetic."""


@dataclass
class Joined:
    """Matrices that share one scale_2, by name."""

    members: Sequence[tuple[str, LazyTensor]]
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def scale(self) -> "np.float32":
        """The shared scale_2. Raises NotExpressible for a value that isn't finite."""
        with self._lock:
            return self._scale

    @cached_property
    def _scale(self) -> "np.float32":
        largest = np.float32(0)
        for name, tensor in self.members:
            rows, cols = matrix_shape(tensor.shape)
            whole = Box(0, rows, 0, cols)
            block_bytes = _AT_ONCE * ITEMSIZE[tensor.dtype]
            for box in box_blocks(whole, tensor.dtype, block_bytes):
                found = np.abs(_read(tensor, box)).max(initial=0)
                if not np.isfinite(found):
                    raise NotExpressible(
                        f"{name}: holds values that are not finite, which NVFP4 can't express"
                    )
                largest = max(largest, found)
        return np.float32(largest / (_LARGEST * _LARGEST_SCALE)) or np.float32(1)


@dataclass(frozen=True)
class Groups:
    """A matrix to be quantized, and the matrices that it shares scale_2 with."""

    source: LazyTensor
    joined: Joined

    def numbers_and_codes(self, box: Box) -> tuple[Floats, Bytes]:
        """(values [rows, groups, 16], codes of their scales [rows, groups]) of a rectangle of whole groups."""
        numbers = _read(self.source, box).reshape(box.rows, -1, GROUP)
        scales = largest_of_groups(numbers)[:, :, 0] / (_LARGEST * self.joined.scale)
        scales = np.where(scales == 0, np.float32(1), scales).clip(_LEAST_SCALE, _LARGEST_SCALE)
        return numbers, e4m3(scales)

    def scale_of(self, codes: Bytes) -> Floats:
        """The factor of each group's values at dequantization."""
        return e4m3_values(codes) * self.joined.scale


@dataclass(frozen=True)
class Fp4Values:
    """The codes as a tensor [rows, cols / 2], two codes per byte."""

    groups: Groups
    errors: Rounding
    dtype: str = "uint8"

    @property
    def shape(self) -> Shape:
        rows, cols = matrix_shape(self.groups.source.shape)
        return rows, cols // 2

    @property
    def read(self) -> TensorInfo:
        """Shape and dtype of the tensor after dequantization."""
        return TensorInfo(self.groups.source.shape, READ_AS)

    def read_into(self, box: Box, out: Bytes) -> None:
        self.read_both(box, out)

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Read the stored bytes of a rectangle. Returns the dequantized bytes, from which fingerprints are computed."""
        pair_bytes = 2 * ITEMSIZE[READ_AS]
        read = np.empty((box.rows, box.cols * pair_bytes), np.uint8)
        for part, whole in _parts(box):
            numbers, scales = self.groups.numbers_and_codes(whole)
            factor = self.groups.scale_of(scales)[:, :, None]
            pairs = e2m1(numbers / factor).reshape(whole.rows, -1, 2)
            packed = pairs[:, :, 0] | pairs[:, :, 1] << 4
            values = nvfp4_pairs()[packed].reshape(numbers.shape)
            values *= factor
            self.errors.add(values - numbers)
            first = part.col0 - whole.col0 // 2
            np.copyto(window(out, box, part, 1), packed[:, first : first + part.cols])
            wanted = values.reshape(whole.rows, -1)[:, 2 * first : 2 * (first + part.cols)]
            place = window(read, box, part, pair_bytes)
            np.copyto(place, rounding.rounded(np.ascontiguousarray(wanted), READ_AS))
        return read


@dataclass(frozen=True)
class Fp4Scales:
    """The scales as a tensor [rows, cols / 16]."""

    groups: Groups
    dtype: str = "float8_e4m3fn"

    @property
    def shape(self) -> Shape:
        return scales_shape(self.groups.source.shape)

    def read_into(self, box: Box, out: Bytes) -> None:
        for part in box_blocks(box, self.dtype, _AT_ONCE // GROUP):
            whole = Box(part.row0, part.row1, part.col0 * GROUP, part.col1 * GROUP)
            np.copyto(window(out, box, part, 1), self.groups.numbers_and_codes(whole)[1])

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Like read_into. Returns no bytes: a reader of the output gets no such tensor."""
        self.read_into(box, out)
        return out[:0]


@dataclass(frozen=True)
class Fp4Scale2:
    """scale_2 as a tensor without axes."""

    joined: Joined
    dtype: str = "float32"
    shape: Shape = ()

    def read_into(self, box: Box, out: Bytes) -> None:
        np.copyto(out, np.array([[self.joined.scale]], np.float32).view(np.uint8))

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Like read_into. Returns no bytes: a reader of the output gets no such tensor."""
        self.read_into(box, out)
        return out[:0]


def scales_shape(shape: Shape) -> Shape:
    rows, cols = matrix_shape(shape)
    return rows, cols // GROUP


def e2m1(numbers: Floats) -> Bytes:
    """The 4-bit codes of numbers, one per byte."""
    magnitude = np.abs(numbers)
    codes = np.zeros(numbers.shape, np.uint8)
    # Comparisons are several times as fast as a search. A tie goes to the even code.
    for place, bound in enumerate(_BOUNDS):
        codes += magnitude >= bound if place % 2 else magnitude > bound
    codes += (numbers < 0).astype(np.uint8) * np.uint8(8)
    return codes


def _parts(box: Box) -> "list[tuple[Box, Box]]":
    """Blocks of a rectangle of bytes, each with the smallest rectangle of elements that holds its groups completely."""
    half = GROUP // 2
    return [
        (part, Box(part.row0, part.row1, part.col0 // half * GROUP, -(-part.col1 // half) * GROUP))
        for part in box_blocks(box, "uint8", _AT_ONCE // 2)
    ]


def _read(tensor: LazyTensor, box: Box) -> Floats:
    stored = np.empty((box.rows, box.cols * ITEMSIZE[tensor.dtype]), np.uint8)
    tensor.read_into(box, stored)
    return (
        rounding.exact(stored.reshape(-1), tensor.dtype)
        .astype(np.float32)
        .reshape(box.rows, box.cols)
    )
