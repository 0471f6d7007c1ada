"""Matrices of 4-bit floats (E2M1), two in each byte with the low four bits first, which are computed while they are read.

    MXFP4    32 elements of a row share a power of two:                2 ^ (scale - 127)
    NVFP4    16 elements of a row share a float8_e4m3fn, and all elements a float32

Products are computed in float32, and then rounded to nearest even. Sources: the OCP Microscaling Formats specification, 1.0;
nvidia-modelopt 0.47.
"""

from dataclasses import dataclass
from functools import cache

from formats.lazy_numpy import Floats, np
from formats.tensor import Box, Bytes, LazyTensor, Shape, read_tensor, whole_groups
from megaconv.values.rounding import rounded
from megaconv.values.scaled import fp8_values, read_bytes

MXFP4_GROUP = 32
"""Elements of MXFP4 that share a scale."""
NVFP4_GROUP = 16


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A tensor [..., in] of 4-bit values, two per byte.

    Each 32 elements of a row have a power of two as their scale.
    """

    packed: LazyTensor
    """[rows, in / 2] bytes."""
    scales: LazyTensor
    """[rows, in / 32] exponents."""
    shape: Shape
    dtype: str

    def read_into(self, box: Box, out: Bytes) -> None:
        whole = whole_groups(box, MXFP4_GROUP)
        packed, exponents = _packed_and_scales(self.packed, self.scales, whole, MXFP4_GROUP)
        values = _scaled(fp4_pairs()[packed], powers()[exponents], MXFP4_GROUP)
        wanted = values[:, box.col0 - whole.col0 : box.col1 - whole.col0]
        np.copyto(out, rounded(np.ascontiguousarray(wanted), self.dtype))


@dataclass(frozen=True)
class NvFp4Tensor:
    """A matrix [rows, cols] of 4-bit values, two per byte.

    Each 16 elements of a row have a scale, and all have one more.
    """

    packed: LazyTensor
    """[rows, cols / 2] bytes."""
    scales: LazyTensor
    """[rows, cols / 16] in float8_e4m3fn."""
    scale: LazyTensor
    """A single float32."""
    shape: Shape
    dtype: str
    divides: bool = False
    """True for compressed-tensors: `scale` divides the scales of the groups, and a zero keeps its sign."""

    def read_into(self, box: Box, out: Bytes) -> None:
        whole = whole_groups(box, NVFP4_GROUP)
        packed, codes = _packed_and_scales(self.packed, self.scales, whole, NVFP4_GROUP)
        pairs = fp4_pairs() if self.divides else nvfp4_pairs()
        values = _scaled(pairs[packed], self._scales_of_groups(codes), NVFP4_GROUP)
        wanted = values[:, box.col0 - whole.col0 : box.col1 - whole.col0]
        np.copyto(out, rounded(np.ascontiguousarray(wanted), self.dtype))

    def _scales_of_groups(self, codes: Bytes) -> Floats:
        """The factors [rows, groups] of the groups. codes: their stored scales."""
        of_all: np.float32 = read_tensor(self.scale).view(np.float32).reshape(-1)[0]
        stored = fp8_values()[codes]
        with np.errstate(divide="ignore", invalid="ignore"):
            return stored / of_all if self.divides else stored * of_all


def _scaled(values: Floats, scales: Floats, group: int) -> Floats:
    """The products [rows, cols] of values, two of each byte, and the scales [rows, cols / group] of their groups."""
    rows, groups = scales.shape
    products = values.reshape(rows, groups, group)
    with np.errstate(over="ignore", invalid="ignore"):
        products *= scales[:, :, None]
    return products.reshape(rows, -1)


def _packed_and_scales(
    packed: LazyTensor, scales: LazyTensor, box: Box, group: int
) -> tuple[Bytes, Bytes]:
    """(bytes of two values each, stored scales) of a rectangle of whole groups. group: values of a row with one scale."""
    pairs = box._replace(col0=box.col0 // 2, col1=box.col1 // 2)
    groups = box._replace(col0=box.col0 // group, col1=box.col1 // group)
    return read_bytes(packed, pairs), read_bytes(scales, groups)


@cache
def fp4_pairs() -> Floats:
    """[256, 2]: the values of the low and the high four bits of a byte."""
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([positive, -positive])
    code = np.arange(256)
    return np.stack([values[code & 15], values[code >> 4]], axis=1)


@cache
def nvfp4_pairs() -> Floats:
    """The same for NVFP4, without the sign of a negative zero, as in ModelOpt."""
    return fp4_pairs() + np.float32(0)


@cache
def powers() -> Floats:
    """2 ^ (scale - 127) of all 256 scales."""
    with np.errstate(over="ignore"):
        return np.ldexp(1.0, np.arange(256) - 127).astype(np.float32)
