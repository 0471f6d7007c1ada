"""Quantizes weights as MLX's mode `affine` does: codes of 2 to 8 bits, with a scale and a bias per group of a row.

    edge = the number of the group that is farther from zero, of its largest and its smallest
    scale = (largest - smallest) / (2 ^ bits - 1), at least 1e-7, negative if edge is the largest
    if round(edge / scale) isn't 0:    scale = edge / round(edge / scale), bias = edge;    otherwise bias = 0
    code = (w - bias) / scale to the nearest integer from 0 to 2 ^ bits - 1, a tie to the even one

All of this is computed in float32. Scale and bias are then rounded to the dtype of the weight. `mlx_groups.py` is the
inverse. Some norms are stored with 1 added, which is rounded too. Source: mlx 0.32, mlx.core.quantize.
"""

from dataclasses import dataclass

from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, ComputedTensor, LazyTensor, Shape
from megaconv.errors import NotExpressible
from megaconv.model.ir import TensorInfo
from megaconv.values import rounding
from megaconv.values.code_tensors import Codes, Quantized, Rounding, Scales
from megaconv.values.mlx_groups import WORD_BITS, columns_of_groups
from megaconv.values.scaled import read_bytes, read_floats
from megaconv.values.shifted import add

_LEAST_SCALE = 1e-7


@dataclass(frozen=True)
class AffineGroups:
    """A weight to be quantized."""

    source: LazyTensor
    name: str
    """The tensor's name for messages."""
    bits: int
    size: int
    """Elements of a row that share a scale. A row has whole groups."""

    @property
    def dtype(self) -> str:
        """The dtype of scales and biases, and of the weight for its readers."""
        return self.source.dtype

    def numbers(self, box: Box) -> Floats:
        """The numbers [rows, groups, size] of a rectangle of whole groups."""
        return read_floats(self.source, box).reshape(box.rows, -1, self.size)

    def scales_and_biases(self, numbers: Floats) -> tuple[Floats, Floats]:
        """(scales, biases) [rows, groups, 1] of numbers, before they are rounded.

        Raises NotExpressible for a number that isn't finite, and for a group whose span isn't.
        """
        # numpy looks for the largest of columns much faster than for those of short rows.
        columns = np.ascontiguousarray(numbers.reshape(-1, self.size).T)
        per_group = (*numbers.shape[:2], 1)
        largest = columns.max(axis=0).reshape(per_group)
        smallest = columns.min(axis=0).reshape(per_group)
        with np.errstate(over="ignore", invalid="ignore"):
            span = largest - smallest
        if not np.isfinite(span).all():
            raise NotExpressible(
                f"{self.name}: holds values that are not finite, or too far apart, which {self.bits} bits can't express"
            )
        begins_small = np.abs(smallest) > np.abs(largest)
        edge = np.where(begins_small, smallest, largest)
        steps = np.float32((1 << self.bits) - 1)
        scale = np.maximum(span / steps, np.float32(_LEAST_SCALE))
        scale = np.where(begins_small, scale, -scale)
        of_edge = np.rint(edge / scale)
        has_bias = of_edge != 0
        scale = np.divide(edge, of_edge, out=scale, where=has_bias)
        return scale, np.where(has_bias, edge, np.float32(0))

    def codes(self, numbers: Floats, scales: Floats, biases: Floats) -> Bytes:
        """The codes [rows, groups, size] of numbers, one in each byte."""
        most = np.float32((1 << self.bits) - 1)
        found: Bytes = np.rint((numbers - biases) / scales).clip(0, most).astype(np.uint8)
        return found

    def values(self, codes: Bytes, scales: Floats, biases: Floats) -> Floats:
        """The numbers that a reader gets for codes, before they are rounded."""
        return codes * self._rounded(scales) + self._rounded(biases)

    def _rounded(self, numbers: Floats) -> Floats:
        stored = rounding.rounded(np.ascontiguousarray(numbers), self.dtype).reshape(-1)
        return rounding.exact(stored, self.dtype).astype(np.float32).reshape(numbers.shape)


@dataclass(frozen=True)
class AffineCodes(Codes):
    """The codes as a tensor of words [..., cols * bits / 32]."""

    groups: AffineGroups
    errors: Rounding
    dtype: str = "uint32"
    whole_rows: bool = True
    """A block of the engine has whole rows, because a word may hold a part of a code."""

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
        return columns_of_groups(self.source.shape, self.group, self.group * self.bits // WORD_BITS)

    @property
    def read(self) -> TensorInfo:
        return TensorInfo(self.source.shape, self.source.dtype)

    def quantized(self, box: Box) -> Quantized:
        numbers = self.groups.numbers(box)
        scales, biases = self.groups.scales_and_biases(numbers)
        codes = self.groups.codes(numbers, scales, biases)
        values = self.groups.values(codes, scales, biases)
        words = packed(codes.reshape(box.rows, -1), self.bits)
        return Quantized(words, values.reshape(box.rows, -1), values - numbers)


@dataclass(frozen=True)
class AffineScales(Scales):
    """The scales or the biases as a tensor [..., cols / size of a group]."""

    groups: AffineGroups
    of_biases: bool

    @property
    def dtype(self) -> str:
        return self.groups.dtype

    @property
    def group(self) -> int:
        return self.groups.size

    @property
    def shape(self) -> Shape:
        return columns_of_groups(self.groups.source.shape, self.group, 1)

    def scales(self, box: Box) -> Bytes:
        both = self.groups.scales_and_biases(self.groups.numbers(box))
        return rounding.rounded(np.ascontiguousarray(both[self.of_biases][:, :, 0]), self.dtype)


@dataclass(frozen=True)
class PlusOne(ComputedTensor):
    """Another tensor with 1 added, rounded to its dtype."""

    errors: Rounding

    @property
    def read(self) -> TensorInfo:
        """Shape and dtype of the tensor for its readers, who subtract 1 again."""
        return TensorInfo(self.shape, self.dtype)

    def read_into(self, box: Box, out: Bytes) -> None:
        self.read_both(box, out)

    def read_both(self, box: Box, out: Bytes) -> Bytes:
        """Read the stored bytes of a rectangle. Returns those after the subtraction, from which fingerprints are computed."""
        values = read_bytes(self.source, box, ITEMSIZE[self.dtype])
        stored = add(values, self.dtype, 1)
        read = add(stored, self.dtype, -1)
        errors = rounding.exact(read, self.dtype) - rounding.exact(values, self.dtype)
        self.errors.add(errors.astype(np.float32))
        np.copyto(out, stored)
        return read


def packed(codes: Bytes, bits: int) -> Bytes:
    """One byte for each code [rows, codes] -> the bytes of rows [rows, bytes]."""
    if bits == 8:
        return codes
    if bits == 4:
        return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    # Eight codes fill as many bytes as a code has bits.
    eight = codes.reshape(len(codes), -1, 8).astype(np.uint64)
    eight <<= np.arange(0, 8 * bits, bits, dtype=np.uint64)
    words = np.bitwise_or.reduce(eight, axis=2).astype("<u8")
    found = words[:, :, None].view(np.uint8)[:, :, :bits]
    return np.ascontiguousarray(found).reshape(len(codes), -1)
