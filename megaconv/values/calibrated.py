"""Quantizes weights to FP8 with one scale, to INT8 by rows and to INT4 by groups, as ModelOpt's unified checkpoints.

    fp8                    scale = max |w| / 448 of all;         code = e4m3(w / scale, rounded to the dtype of w)
    int8-sq                scale = max |w| / 127 of the row;     code = w / scale to nearest even
    int4-awq, w4a8-awq     scale = max |w| / 7 of 128 of a row;  code = w / scale to nearest even

Here w is the matrix after the factors of its columns (`smoothed.py`). Scales are float32, 1 for zeros. A byte of INT4
holds row 2i in its low four bits and row 2i + 1 in its high ones. `modelopt.py` is the inverse. Source: quant_utils.py
of ModelOpt 0.47.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Protocol

from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, box_blocks, matrix_shape
from megaconv.errors import NotExpressible
from megaconv.model.assembled import window
from megaconv.model.ir import TensorInfo
from megaconv.values import rounding
from megaconv.values.fp8_blocks import (
    AT_ONCE,
    LARGEST,
    READ_AS,
    Rounding,
    e4m3,
    e4m3_values,
    read_floats,
)
from megaconv.values.fp8_rows import Rows
from megaconv.values.smoothed import round_to

GROUP = 128
"""Elements of a row that share a scale of INT4."""
_LARGEST_INT4 = 7.0


@dataclass
class SharedScale:
    """The largest magnitude of matrices that share a scale, divided by 448."""

    members: Sequence[tuple[str, LazyTensor]]
    """Matrices by name."""
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def scale(self) -> "np.float32":
        """The scale. Raises NotExpressible for a value that isn't finite."""
        with self._lock:
            return self._scale

    @cached_property
    def _scale(self) -> "np.float32":
        largest = np.float32(0)
        for name, tensor in self.members:
            rows, cols = matrix_shape(tensor.shape)
            step = AT_ONCE * ITEMSIZE[tensor.dtype]
            for box in box_blocks(Box(0, rows, 0, cols), tensor.dtype, step):
                found = np.abs(read_floats(tensor, box)).max(initial=0)
                if not np.isfinite(found):
                    raise NotExpressible(
                        f"{name}: holds values that are not finite, which FP8 can't express"
                    )
                largest = max(largest, found)
        return np.float32(largest / np.float32(LARGEST)) or np.float32(1)


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

    def codes(self, box: Box) -> tuple[Bytes, Floats]:
        """(codes, scales) of a rectangle. For INT4 the rectangle has whole groups."""
        numbers = read_floats(self.smoothed, box)
        scales = self.quantizer.scales_of(box, numbers)
        return self.quantizer.codes(numbers, scales), scales

    def read(self, box: Box, codes: Bytes, scales: Floats) -> Floats:
        """The numbers that a reader gets, before they are rounded to the dtype of the reader."""
        numbers = self.quantizer.values(codes) * scales
        if self.pre_quant is not None:
            numbers *= self.pre_quant[box.col0 : box.col1]
        return numbers


@dataclass(frozen=True, eq=False)
class ByteCodes:
    """The codes of a matrix in FP8 or INT8, one per byte."""

    matrix: Matrix
    errors: Rounding

    @property
    def shape(self) -> Shape:
        return self.matrix.source.shape

    @property
    def dtype(self) -> str:
        return self.matrix.quantizer.dtype

    @property
    def read(self) -> TensorInfo:
        """Shape and dtype of the tensor after dequantization."""
        return TensorInfo(self.shape, READ_AS)

    def read_into(self, box: Box, out: Bytes) -> None:
        self.read_both(box, out)

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Read the stored bytes of a rectangle. Returns the dequantized bytes, from which fingerprints are computed."""
        itemsize = ITEMSIZE[READ_AS]
        read = np.empty((box.rows, box.cols * itemsize), np.uint8)
        for part in box_blocks(box, self.dtype, AT_ONCE):
            codes, scales = self.matrix.codes(part)
            numbers = self.matrix.read(part, codes, scales)
            self.errors.add(numbers - read_floats(self.matrix.source, part))
            np.copyto(window(out, box, part, 1), codes)
            np.copyto(window(read, box, part, itemsize), rounding.rounded(numbers, READ_AS))
        return read


@dataclass(frozen=True, eq=False)
class NibbleCodes:
    """The codes of a matrix in INT4: [rows / 2, cols], two rows in each byte."""

    matrix: Matrix
    errors: Rounding
    dtype: str = "uint8"
    whole_rows: bool = True
    """A block has whole rows: the two rows of a byte don't follow each other otherwise."""

    @property
    def shape(self) -> Shape:
        rows, cols = matrix_shape(self.matrix.source.shape)
        return rows // 2, cols

    @property
    def read(self) -> TensorInfo:
        """Shape and dtype of the tensor after dequantization."""
        return TensorInfo(self.matrix.source.shape, READ_AS)

    def read_into(self, box: Box, out: Bytes) -> None:
        self.read_both(box, out)

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Read the stored bytes of a rectangle. Returns the dequantized bytes, from which fingerprints are computed."""
        itemsize = ITEMSIZE[READ_AS]
        read = np.empty((2 * box.rows, box.cols * itemsize), np.uint8)
        lines = Box(2 * box.row0, 2 * box.row1, box.col0, box.col1)
        for part, whole in self._parts(box):
            codes, scales = self.matrix.codes(whole)
            numbers = self.matrix.read(whole, codes, scales)
            self.errors.add(numbers - read_floats(self.matrix.source, whole))
            low, high = codes[0::2] & 15, codes[1::2] << 4
            first = part.col0 - whole.col0
            last = first + part.cols
            np.copyto(window(out, box, part, 1), (low | high)[:, first:last])
            wanted = np.ascontiguousarray(numbers[:, first:last])
            place = window(read, lines, whole._replace(col0=part.col0, col1=part.col1), itemsize)
            np.copyto(place, rounding.rounded(wanted, READ_AS))
        return read

    def _parts(self, box: Box) -> "list[tuple[Box, Box]]":
        """Blocks of a rectangle of bytes, each with the rectangle of elements that holds their groups."""
        cols = matrix_shape(self.matrix.source.shape)[1]
        found = []
        for part in box_blocks(box, self.dtype, max(AT_ONCE // 2, cols)):
            first, last = part.col0 // GROUP * GROUP, -(-part.col1 // GROUP) * GROUP
            found.append((part, Box(2 * part.row0, 2 * part.row1, first, last)))
        return found


@dataclass(frozen=True, eq=False)
class GroupScales:
    """The scales of a matrix in INT4 as a tensor [rows, cols / 128]."""

    smoothed: LazyTensor
    quantizer: Int4Groups
    dtype: str = "float32"

    @property
    def shape(self) -> Shape:
        rows, cols = matrix_shape(self.smoothed.shape)
        return rows, cols // GROUP

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize = ITEMSIZE[self.dtype]
        for part in box_blocks(box, self.dtype, AT_ONCE // GROUP * itemsize):
            whole = Box(part.row0, part.row1, part.col0 * GROUP, part.col1 * GROUP)
            scales = self.quantizer.group_scales(read_floats(self.smoothed, whole))
            stored = np.ascontiguousarray(scales, np.float32).view(np.uint8)
            np.copyto(window(out, box, part, itemsize), stored)

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Like read_into. Returns no bytes: a reader of the output gets no such tensor."""
        self.read_into(box, out)
        return out[:0]


@dataclass(frozen=True, eq=False)
class OneScale:
    """A shared scale as a tensor without axes."""

    shared: SharedScale
    dtype: str = "float32"
    shape: Shape = ()

    def read_into(self, box: Box, out: Bytes) -> None:
        np.copyto(out, np.array([[self.shared.scale]], np.float32).view(np.uint8))

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Like read_into. Returns no bytes: a reader of the output gets no such tensor."""
        self.read_into(box, out)
        return out[:0]
