"""Quantizes weights to FP8 with one scale, to INT8 by rows and to INT4 by groups, as ModelOpt's unified checkpoints.

    fp8                    scale = max |w| / 448 of all;         code = e4m3(w / scale, rounded to the dtype of w)
    int8-sq                scale = max |w| / 127 of the row;     code = w / scale to nearest even
    int4-awq, w4a8-awq     scale = max |w| / 7 of 128 of a row;  code = w / scale to nearest even

Here w is the matrix after the factors of its columns (`smoothed.py`). Scales are float32, 1 for zeros. A byte of INT4
holds row 2i in its low four bits and row 2i + 1 in its high ones. `modelopt.py` is the inverse. Source: quant_utils.py
of ModelOpt 0.47.
"""

from dataclasses import dataclass
from typing import Protocol

from formats.lazy_numpy import Floats, np
from formats.tensor import Box, Bytes, LazyTensor, Shape, matrix_shape
from megaconv.errors import NotExpressible
from megaconv.values.code_tensors import Codes, Quantized, Rounding, Scales
from megaconv.values.fp8_blocks import e4m3, e4m3_values
from megaconv.values.fp8_rows import Rows
from megaconv.values.scaled import read_floats
from megaconv.values.shared_scale import SharedScale
from megaconv.values.smoothed import round_to

GROUP = 128
"""Elements of a row that share a scale of INT4."""
_LARGEST_INT4 = 7.0


class Quantizer(Protocol):
    """A way to quantize a matrix."""

    @property
    def dtype(self) -> str:
        """The dtype of the codes."""
        ...

    def scales_of(self, box: Box, numbers: Floats) -> Floats:
        """The scales of a rectangle, as an array that broadcasts to it.

        numbers: the elements of the rectangle. For INT4 the rectangle has whole groups.
        """
        ...

    def codes(self, numbers: Floats, scales: Floats) -> Bytes:
        """The codes of numbers, one per byte."""
        ...

    def values(self, codes: Bytes) -> Floats:
        """The numbers that codes stand for, without their scale."""
        ...


@dataclass(frozen=True)
class Fp8:
    """FP8 with a single scale. The quotient is rounded to the weight's dtype first, as torch computes it."""

    shared: SharedScale
    weight_dtype: str
    dtype: str = "float8_e4m3fn"

    def scales_of(self, box: Box, numbers: Floats) -> Floats:
        return np.full((1, 1), self.shared.scale, np.float32)

    def codes(self, numbers: Floats, scales: Floats) -> Bytes:
        return e4m3(round_to(numbers / scales, self.weight_dtype))

    def values(self, codes: Bytes) -> Floats:
        return e4m3_values(codes)


def _integers(quotients: Floats, least: int, most: int) -> Bytes:
    """The nearest integers in a range, as the bytes of int8."""
    codes: Bytes = np.rint(quotients).clip(least, most).astype(np.int8).view(np.uint8)
    return codes


@dataclass(frozen=True)
class Int8Rows:
    """INT8 with a scale for each row."""

    rows: Rows
    dtype: str = "int8"

    def scales_of(self, box: Box, numbers: Floats) -> Floats:
        return self.rows.scales_of(box)

    def codes(self, numbers: Floats, scales: Floats) -> Bytes:
        return _integers(numbers / scales, -128, 127)

    def values(self, codes: Bytes) -> Floats:
        return codes.view(np.int8).astype(np.float32)


@dataclass(frozen=True)
class Int4Groups:
    """INT4 with a scale for each group of a row."""

    name: str
    dtype: str = "int8"

    def scales_of(self, box: Box, numbers: Floats) -> Floats:
        return np.repeat(self.group_scales(numbers), GROUP, axis=1)

    def group_scales(self, numbers: Floats) -> Floats:
        """The scales [rows, groups] of whole groups. Raises NotExpressible for a value that isn't finite."""
        largest = np.abs(numbers.reshape(len(numbers), -1, GROUP)).max(axis=2, initial=0)
        if not np.isfinite(largest).all():
            raise NotExpressible(
                f"{self.name}: holds values that are not finite, which INT4 can't express"
            )
        scales = largest / np.float32(_LARGEST_INT4)
        return np.where(scales == 0, np.float32(1), scales)

    def codes(self, numbers: Floats, scales: Floats) -> Bytes:
        return _integers(numbers / scales, -8, 7)

    def values(self, codes: Bytes) -> Floats:
        return codes.view(np.int8).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix to be quantized."""

    source: LazyTensor
    """The original matrix. Errors are differences from it."""
    smoothed: LazyTensor
    """The matrix after the factors of its columns."""
    quantizer: Quantizer
    pre_quant: Floats | None
    """Factors [in] by which a reader multiplies the columns; None: no factors."""

    def quantized(self, box: Box) -> Quantized:
        """Quantize a rectangle, with one code per byte. For INT4 the rectangle has whole groups."""
        numbers = read_floats(self.smoothed, box)
        scales = self.quantizer.scales_of(box, numbers)
        codes = self.quantizer.codes(numbers, scales)
        values = self.quantizer.values(codes) * scales
        if self.pre_quant is not None:
            values *= self.pre_quant[box.col0 : box.col1]
        return Quantized(codes, values, values - read_floats(self.source, box))


@dataclass(frozen=True, eq=False)
class ByteCodes(Codes):
    """The codes of a matrix in FP8 or INT8, one per byte."""

    matrix: Matrix
    errors: Rounding
    bits: int = 8
    group: int = 1

    @property
    def source(self) -> LazyTensor:
        return self.matrix.source

    @property
    def dtype(self) -> str:
        return self.matrix.quantizer.dtype

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def quantized(self, box: Box) -> Quantized:
        return self.matrix.quantized(box)


@dataclass(frozen=True, eq=False)
class NibbleCodes(Codes):
    """The codes of a matrix in INT4: [rows / 2, cols], two rows in each byte."""

    matrix: Matrix
    errors: Rounding
    dtype: str = "uint8"
    bits: int = 8
    group: int = GROUP
    rows_per_row: int = 2
    whole_rows: bool = True
    """A block of the engine has whole rows: the two rows of a byte don't follow each other otherwise."""

    @property
    def source(self) -> LazyTensor:
        return self.matrix.source

    @property
    def shape(self) -> Shape:
        rows, cols = matrix_shape(self.source.shape)
        return rows // 2, cols

    def quantized(self, box: Box) -> Quantized:
        codes, values, errors = self.matrix.quantized(box)
        low, high = codes[0::2] & np.uint8(15), codes[1::2] << np.uint8(4)
        return Quantized(low | high, values, errors)


@dataclass(frozen=True, eq=False)
class Int4Scales(Scales):
    """The scales of a matrix in INT4 as a tensor [rows, cols / 128]."""

    smoothed: LazyTensor
    quantizer: Int4Groups
    dtype: str = "float32"
    group: int = GROUP

    @property
    def shape(self) -> Shape:
        rows, cols = matrix_shape(self.smoothed.shape)
        return rows, cols // GROUP

    def scales(self, box: Box) -> Bytes:
        scales = self.quantizer.group_scales(read_floats(self.smoothed, box))
        return np.ascontiguousarray(scales, np.float32).view(np.uint8)
