"""Quantizes weights to NVFP4 as ModelOpt does: 4 bits each, a scale per 16 elements of a row, and a scale of all.

    scale_2 = max |x| / (6 * 448) of all;  scale = e4m3(max |x| of the 16 / (6 * scale_2)), 1 for zeros, 2^-9 or more
    code = x / (scale * scale_2) to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, a tie to the even code; 8 more where x < 0

The scales are float8_e4m3fn, scale_2 is float32; all arithmetic is in float32. Even columns are the low four bits.
Fused matrices share one scale_2 (`shared_scale.py`). A tensor is read three times: for that value, for its scales and for its codes.
`quantized.py` is the inverse. Source: nvfp4_tensor.py of ModelOpt 0.47.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from formats.lazy_numpy import Floats, np
from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.values.code_tensors import Codes, Quantized, Rounding, Scales, largest_of_groups
from megaconv.values.four_bits import nvfp4_pairs
from megaconv.values.fp8_blocks import e4m3, e4m3_values
from megaconv.values.scaled import read_floats
from megaconv.values.shared_scale import SharedScale

GROUP = 16
"""Elements of a row that share a scale."""
SCALES, SCALE_2 = "_scale", "_scale_2"
"""The suffixes of the scales' names after the weight's name."""
_LARGEST, _LARGEST_SCALE, _LEAST_SCALE = 6.0, 448.0, 2.0**-9
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclass(frozen=True)
class Groups:
    """A matrix to be quantized, with scale_2."""

    source: LazyTensor
    shared: SharedScale

    def numbers_and_codes(self, box: Box) -> tuple[Floats, Bytes]:
        """(values [rows, groups, 16], codes of their scales [rows, groups]) of a rectangle of whole groups."""
        numbers = read_floats(self.source, box).reshape(box.rows, -1, GROUP)
        scales = largest_of_groups(numbers)[:, :, 0] / (_LARGEST * self.shared.scale)
        scales = np.where(scales == 0, np.float32(1), scales).clip(_LEAST_SCALE, _LARGEST_SCALE)
        return numbers, e4m3(scales)

    def scale_of(self, codes: Bytes) -> Floats:
        """The factor of each group's values at dequantization."""
        return e4m3_values(codes) * self.shared.scale


@dataclass(frozen=True)
class Fp4Values(Codes):
    """The codes as a tensor [rows, cols / 2], two codes per byte."""

    groups: Groups
    errors: Rounding
    dtype: str = "uint8"
    bits: int = 4
    group: int = GROUP

    @property
    def source(self) -> LazyTensor:
        return self.groups.source

    @property
    def shape(self) -> Shape:
        rows, cols = matrix_shape(self.source.shape)
        return rows, cols // 2

    def quantized(self, box: Box) -> Quantized:
        numbers, scales = self.groups.numbers_and_codes(box)
        factors = self.groups.scale_of(scales)[:, :, None]
        pairs = e2m1(numbers / factors).reshape(box.rows, -1, 2)
        codes = pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)
        values = nvfp4_pairs()[codes].reshape(numbers.shape)
        values *= factors
        return Quantized(codes, values.reshape(box.rows, -1), values - numbers)


@dataclass(frozen=True)
class Fp4Scales(Scales):
    """The scales as a tensor [rows, cols / 16]."""

    groups: Groups
    dtype: str = "float8_e4m3fn"
    group: int = GROUP

    @property
    def shape(self) -> Shape:
        return scales_shape(self.groups.source.shape)

    def scales(self, box: Box) -> Bytes:
        return self.groups.numbers_and_codes(box)[1]


def shared_scale(members: Sequence[tuple[str, LazyTensor]]) -> SharedScale:
    """scale_2 of matrices, by name."""
    return SharedScale(members, _LARGEST * _LARGEST_SCALE, "NVFP4")


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
