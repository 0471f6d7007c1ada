"""Small floats of compressed-tensors: MXFP4 and NVFP4 of 4 bits, and MXFP8.

    MXFP4    X.weight_packed [out, in / 2] uint8, X.weight_scale [out, in / 32] uint8: exponents of powers of two
    NVFP4    X.weight_packed [out, in / 2] uint8, X.weight_scale [out, in / 16] float8_e4m3fn, X.weight_global_scale [1]
             float32: value * (scale / global scale)
    MXFP8    X.weight [out, in] float8_e4m3fn, X.weight_scale [out, in / 32] uint8: exponents of powers of two

Source: compressed-tensors 0.20.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from formats.tensor import Box, Bytes, ComputedTensor, LazyTensor, matrix_shape
from megaconv.errors import TensorMismatch
from megaconv.values.beside_weights import fitting, needed
from megaconv.values.four_bits import MXFP4_GROUP, NVFP4_GROUP, Mxfp4Tensor, NvFp4Tensor

MXFP4, MXFP8, NVFP4 = "mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"
"""The formats, as compressed-tensors calls them."""
KINDS: Mapping[str, tuple[str, int, int]] = MappingProxyType(
    {MXFP4: ("MXFP4", 4, MXFP4_GROUP), NVFP4: ("NVFP4", 4, NVFP4_GROUP), MXFP8: ("MXFP8", 8, 32)}
)
"""Format -> (its name, bits of a number, numbers of a row with one scale)."""
POWERS = "float8_e8m0fnu"
GLOBAL_SCALE = ".weight_global_scale"
_PACKED, _SCALE = ".weight_packed", ".weight_scale"


@dataclass(frozen=True)
class Exponents(ComputedTensor):
    """uint8 exponents as float8_e8m0fnu, which has the same bytes."""

    @property
    def dtype(self) -> str:
        return POWERS

    def read_into(self, box: Box, out: Bytes) -> None:
        self.source.read_into(box, out)


def from_packed(
    module: str, tensors: Mapping[str, LazyTensor], dtype: str, where: str
) -> Mxfp4Tensor | NvFp4Tensor:
    """The weight of a module with two numbers in each byte. A global scale shows NVFP4.

    Raises TensorMismatch for scales that are missing or don't fit.
    """
    packed = tensors[module + _PACKED]
    scales = needed(module + _SCALE, tensors, where)
    is_nvfp4 = module + GLOBAL_SCALE in tensors
    group = NVFP4_GROUP if is_nvfp4 else MXFP4_GROUP
    stored_as = "float8_e4m3fn" if is_nvfp4 else "uint8"
    rows, half = matrix_shape(packed.shape)
    columns = 2 * half
    grid = (rows, columns // group)
    has_whole_groups = columns % group == 0
    is_scaled = (tuple(scales.shape), scales.dtype) == (grid, stored_as)
    has_pairs = packed.dtype == "uint8" and len(packed.shape) == 2
    if not (has_pairs and has_whole_groups and is_scaled):
        raise TensorMismatch(
            f"{where}: {module}{_PACKED} is {list(packed.shape)} {packed.dtype} "
            f"with scales {list(scales.shape)} {scales.dtype}; "
            f"expected a matrix of uint8 with {list(grid)} scales of {stored_as}",
            code="misshapen-tensor",
        )
    shape = (rows, columns)
    if not is_nvfp4:
        return Mxfp4Tensor(packed, scales, shape, dtype)
    divisor = fitting(module + GLOBAL_SCALE, tensors, (1,), "float32", where)
    return NvFp4Tensor(packed, scales, divisor, shape, dtype, divides=True)
