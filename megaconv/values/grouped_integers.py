"""Quantizes weights to integers of 4 or 8 bits with a scale per group of a row, as compressed-tensors' `pack-quantized`.

    scale = max |w| of the group / 7.5 (4 bits) or / 127.5 (8 bits); the dtype's epsilon for zeros
    for 4 bits, the scale of a group that comes from INT4 is found again (`integer_grids.py`)
    code = w / scale to the nearest integer from -8 to 7 or from -128 to 127, a tie to the even one

Scale and quotient are rounded to the dtype of w, as torch computes them. A word of int32 holds eight or four codes of a
row, the lowest bits first, each with half of the range added. `compressed_tensors.py` is the inverse. Source:
calculate_qparams, quantize and pack_to_int32 of compressed-tensors 0.20.
"""

from dataclasses import dataclass

from formats.lazy_numpy import Floats, np
from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.errors import NotExpressible
from megaconv.values import rounding
from megaconv.values.code_tensors import Codes, Quantized, Rounding, Scales, largest_of_groups
from megaconv.values.integer_grids import scales_of_grids
from megaconv.values.scaled import read_floats
from megaconv.values.smoothed import round_to

_EPSILONS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
_WORD_BYTES = 4


@dataclass(frozen=True)
class Groups:
    """A matrix to be quantized."""

    source: LazyTensor
    name: str
    """The tensor's name for messages."""
    bits: int
    size: int
    """Elements of a row that share a scale: a multiple of the codes of a word, and a divisor of the row."""

    @property
    def per_word(self) -> int:
        """Codes of a word."""
        return 8 * _WORD_BYTES // self.bits

    @property
    def half(self) -> int:
        """The number that is added to a code when it is stored."""
        return 1 << (self.bits - 1)

    @property
    def scale_dtype(self) -> str:
        dtype = self.source.dtype
        return dtype if dtype in _EPSILONS else "float32"

    def numbers_and_scales(self, box: Box) -> tuple[Floats, Floats]:
        """(numbers [rows, groups, size], scales [rows, groups, 1]) of a rectangle of whole groups.

        Raises NotExpressible for a value that isn't finite.
        """
        numbers = read_floats(self.source, box).reshape(box.rows, -1, self.size)
        largest = largest_of_groups(numbers)
        if not np.isfinite(largest).all():
            raise NotExpressible(
                f"{self.name}: holds values that are not finite, which INT{self.bits} can't express"
            )
        scales = round_to(largest / np.float32(self.half - 0.5), self.scale_dtype)
        epsilon = np.float32(_EPSILONS[self.scale_dtype])
        scales = np.where(scales == 0, epsilon, scales)
        if self.bits == 4:
            scales = scales_of_grids(numbers, scales, self.scale_dtype, self.codes)
        return numbers, scales

    def values(self, codes: Bytes, scales: Floats) -> Floats:
        """The numbers that codes [..., size] with scales [..., 1] stand for.

        Raises NotExpressible if one of them is too large: the lowest code is farther from zero than the largest number.
        """
        with np.errstate(over="ignore"):
            found = round_to(codes.view(np.int8) * scales, self.scale_dtype)
        if not np.isfinite(found).all():
            raise NotExpressible(
                f"{self.name}: holds a value near the largest of {self.scale_dtype}, which INT{self.bits} would round to infinity; "
                "leave out --quantize, or pass --dtype with a wider dtype"
            )
        return found

    def codes(self, numbers: Floats, scales: Floats) -> Bytes:
        """The codes of numbers [..., size] with scales [..., 1], as the bytes of int8."""
        quotients = round_to(numbers / scales, self.scale_dtype)
        codes = np.rint(quotients.clip(-self.half, self.half - 1)).astype(np.int8)
        stored: Bytes = codes.view(np.uint8)
        return stored


@dataclass(frozen=True)
class PackedCodes(Codes):
    """The codes as a tensor of words [rows, cols / codes of a word]."""

    groups: Groups
    errors: Rounding
    dtype: str = "int32"

    @property
    def source(self) -> LazyTensor:
        return self.groups.source

    @property
    def bits(self) -> int:
        return self.groups.bits

    @property
    def group(self) -> int:
        return self.groups.size

    @property
    def shape(self) -> Shape:
        rows, cols = matrix_shape(self.source.shape)
        return rows, cols // self.groups.per_word

    def quantized(self, box: Box) -> Quantized:
        numbers, scales = self.groups.numbers_and_scales(box)
        codes = self.groups.codes(numbers, scales)
        errors = self.groups.values(codes, scales) - numbers
        # A reader rounds the product once, to its own dtype.
        values = codes.view(np.int8) * scales
        words = self._words(codes.reshape(box.rows, -1))
        return Quantized(words, values.reshape(box.rows, -1), errors)

    def _words(self, codes: Bytes) -> Bytes:
        """Codes of int8, one per byte -> the bytes of words."""
        stored = codes + np.uint8(self.groups.half)
        if self.bits == 8:
            return stored
        # The codes of a row are 0 to 15 now: each two fill a byte, and the bytes of a word follow in order.
        low, high = stored[:, 0::2], stored[:, 1::2] << np.uint8(4)
        return low | high


@dataclass(frozen=True)
class PackedScales(Scales):
    """The scales as a tensor [rows, cols / size of a group], in the dtype of the weight."""

    groups: Groups

    @property
    def dtype(self) -> str:
        return self.groups.scale_dtype

    @property
    def group(self) -> int:
        return self.groups.size

    @property
    def shape(self) -> Shape:
        rows, cols = matrix_shape(self.groups.source.shape)
        return rows, cols // self.group

    def scales(self, box: Box) -> Bytes:
        _, scales = self.groups.numbers_and_scales(box)
        return rounding.rounded(np.ascontiguousarray(scales[:, :, 0]), self.dtype)
