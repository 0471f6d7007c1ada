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
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, box_blocks, matrix_shape
from megaconv.errors import NotExpressible
from megaconv.model.assembled import window
from megaconv.model.ir import TensorInfo
from megaconv.values import rounding
from megaconv.values.fp8_blocks import AT_ONCE, READ_AS, Rounding, largest_of_groups, read_floats
from megaconv.values.integer_grids import scales_of_grids
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
class PackedCodes:
    """The codes as a tensor of words [rows, cols / codes of a word]."""

    groups: Groups
    errors: Rounding
    dtype: str = "int32"

    @property
    def shape(self) -> Shape:
        rows, cols = matrix_shape(self.groups.source.shape)
        return rows, cols // self.groups.per_word

    @property
    def read(self) -> TensorInfo:
        """Shape and dtype of the tensor after dequantization."""
        return TensorInfo(self.groups.source.shape, READ_AS)

    def read_into(self, box: Box, out: Bytes) -> None:
        self.read_both(box, out)

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Read the stored bytes of a rectangle. Returns the dequantized bytes, from which fingerprints are computed."""
        itemsize, per_word = ITEMSIZE[READ_AS], self.groups.per_word
        read = np.empty((box.rows, box.cols * per_word * itemsize), np.uint8)
        for part, whole in self._parts(box):
            numbers, scales = self.groups.numbers_and_scales(whole)
            codes = self.groups.codes(numbers, scales)
            self.errors.add(self.groups.values(codes, scales) - numbers)
            words = self._words(codes.reshape(whole.rows, -1))
            first = part.col0 - whole.col0 // per_word
            last = first + part.cols
            place = window(out, box, part, _WORD_BYTES)
            np.copyto(place, words[:, first * _WORD_BYTES : last * _WORD_BYTES])
            # A reader rounds the product once, to its own dtype.
            products = (codes.view(np.int8) * scales).reshape(whole.rows, -1)
            wanted = np.ascontiguousarray(products[:, first * per_word : last * per_word])
            place = window(read, box, part, per_word * itemsize)
            np.copyto(place, rounding.rounded(wanted, READ_AS))
        return read

    def _words(self, codes: Bytes) -> Bytes:
        """Codes of int8, one per byte -> the bytes of words."""
        stored = codes + np.uint8(self.groups.half)
        if self.groups.bits == 8:
            return stored
        # The codes of a row are 0 to 15 now: each two fill a byte, and the bytes of a word follow in order.
        low, high = stored[:, 0::2], stored[:, 1::2] << np.uint8(4)
        return low | high

    def _parts(self, box: Box) -> "list[tuple[Box, Box]]":
        """Blocks of a rectangle of words, each with the rectangle of elements that holds their groups."""
        per_word, size = self.groups.per_word, self.groups.size
        found = []
        for part in box_blocks(box, self.dtype, AT_ONCE // per_word * _WORD_BYTES):
            first = part.col0 * per_word // size * size
            last = -(-part.col1 * per_word // size) * size
            found.append((part, Box(part.row0, part.row1, first, last)))
        return found


@dataclass(frozen=True)
class PackedScales:
    """The scales as a tensor [rows, cols / size of a group], in the dtype of the weight."""

    groups: Groups

    @property
    def dtype(self) -> str:
        return self.groups.scale_dtype

    @property
    def shape(self) -> Shape:
        rows, cols = matrix_shape(self.groups.source.shape)
        return rows, cols // self.groups.size

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize, size = ITEMSIZE[self.dtype], self.groups.size
        for part in box_blocks(box, self.dtype, AT_ONCE // size * itemsize):
            whole = Box(part.row0, part.row1, part.col0 * size, part.col1 * size)
            _, scales = self.groups.numbers_and_scales(whole)
            numbers = np.ascontiguousarray(scales[:, :, 0])
            np.copyto(window(out, box, part, itemsize), rounding.rounded(numbers, self.dtype))

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Like read_into. Returns no bytes: a reader of the output gets no such tensor."""
        self.read_into(box, out)
        return out[:0]
