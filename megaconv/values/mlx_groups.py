"""Dequantizes MLX's weights, whose neighbours in a row share a scale, while they are read.

    affine     codes of 1, 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128: code * scale + bias of the group
    mxfp4      E2M1 of 4 bits in groups of 32, with a power of two:            value * 2 ^ (scale - 127)
    mxfp8      float8_e4m3fn in groups of 32, with a power of two:             value * 2 ^ (scale - 127)
    nvfp4      E2M1 of 4 bits in groups of 16, with a float8_e4m3fn:           value * scale

A row is a sequence of bits, the lowest first, which MLX stores as uint32. No group begins inside a word. Products and sums
are computed in float32 and then rounded to nearest even, once. Source: mlx 0.32, mlx.core.quantize.
"""

from dataclasses import dataclass

from formats.lazy_numpy import Floats, np
from formats.tensor import Box, Bytes, LazyTensor, Part, Shape, announce, whole_groups
from megaconv.values.four_bits import fp4_pairs, powers
from megaconv.values.rounding import rounded
from megaconv.values.scaled import fp8_values, read_bytes, read_floats

WORD_BITS = 32


@dataclass(frozen=True)
class Grouping:
    """The form of a quantized weight."""

    mode: str
    """`affine`, `mxfp4`, `mxfp8` or `nvfp4`."""
    bits: int
    size: int
    """Elements of a row that share a scale."""


@dataclass(frozen=True)
class GroupedTensor:
    """A tensor [..., in] of codes in groups, as plain numbers."""

    words: LazyTensor
    """[..., in * bits / 32] uint32."""
    scales: LazyTensor
    """[..., in / size]: floats for `affine`, otherwise codes in uint8."""
    biases: LazyTensor | None
    """[..., in / size], for `affine`."""
    grouping: Grouping
    shape: Shape
    dtype: str

    def announce(self, part: Part) -> None:
        """Have the bytes of a part of the codes fetched ahead."""
        announce(self.words, part)

    def read_into(self, box: Box, out: Bytes) -> None:
        whole = whole_groups(box, self.grouping.size)
        numbers = self._numbers(whole)[:, box.col0 - whole.col0 : box.col1 - whole.col0]
        np.copyto(out, rounded(np.ascontiguousarray(numbers), self.dtype))

    def _numbers(self, box: Box) -> Floats:
        """The numbers [rows, cols] of a rectangle of whole groups, before they are rounded."""
        size = self.grouping.size
        groups = box._replace(col0=box.col0 // size, col1=box.col1 // size)
        values = self._values(self._codes(box)).reshape(box.rows, groups.cols, size)
        with np.errstate(over="ignore", invalid="ignore"):
            values *= self._scales(groups)[:, :, None]
            if self.biases is not None:
                values += read_floats(self.biases, groups)[:, :, None]
        return values.reshape(box.rows, box.cols)

    def _codes(self, box: Box) -> Bytes:
        """The codes of a rectangle of whole groups, one per byte."""
        bits = self.grouping.bits
        first, last = box.col0 * bits // WORD_BITS, box.col1 * bits // WORD_BITS
        words = read_bytes(self.words, box._replace(col0=first, col1=last), itemsize=4)
        return unpacked(words, bits)

    def _values(self, codes: Bytes) -> Floats:
        """The numbers that codes stand for, before they are scaled."""
        if self.grouping.mode == "affine":
            return codes.astype(np.float32)
        if self.grouping.mode == "mxfp8":
            return fp8_values()[codes]
        found: Floats = fp4_pairs()[codes, 0]
        return found

    def _scales(self, groups: Box) -> Floats:
        if self.grouping.mode == "affine":
            return read_floats(self.scales, groups)
        stored = read_bytes(self.scales, groups)
        return fp8_values()[stored] if self.grouping.mode == "nvfp4" else powers()[stored]


def columns_of_groups(shape: Shape, size: int, per_group: int) -> Shape:
    """The shape of a tensor with so many columns for each group of a row. size: columns of a group."""
    *outer, cols = shape
    return (*outer, cols // size * per_group)


def unpacked(stored: Bytes, bits: int) -> Bytes:
    """Bytes of rows [rows, bytes] -> one byte for each code [rows, codes]."""
    rows = len(stored)
    if bits == 8:
        return stored
    if bits == 4:
        low, high = stored & 15, stored >> 4
        return np.stack([low, high], axis=-1).reshape(rows, -1)
    # Eight codes fill as many bytes as a code has bits.
    eight = np.zeros((rows, stored.shape[1] // bits, 8), np.uint8)
    eight[:, :, :bits] = stored.reshape(rows, -1, bits)
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
    largest = np.uint64((1 << bits) - 1)
    codes = (eight.view("<u8") >> shifts) & largest
    found: Bytes = codes.astype(np.uint8).reshape(rows, -1)
    return found
