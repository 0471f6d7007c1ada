"""Quantizes weights as MLX's modes of floats do: codes of 4 or 8 bits, with a scale per group of a row.

    mxfp4    scale = the smallest power of two from (largest / 6) up     of 32 elements, code = E2M1(w / scale)
    mxfp8    scale = the smallest power of two from (largest / 448) up   of 32 elements, code = float8_e4m3fn(w / scale)
    nvfp4    scale = float8_e4m3fn(largest / 6)                          of 16 elements, code = E2M1(w * (1 / scale))

Here `largest` is the largest magnitude of the group. A power of two is stored as its exponent + 127. All of this is computed
in float32, and codes are rounded to nearest even, as in MLX's kernels for Apple's GPUs. On a CPU, MLX computes in the dtype of
the weight, and rounds ties of E2M1 towards zero. `mlx_groups.py` is the inverse. Source: mlx 0.32.4, fp_quantized.h.
"""

from dataclasses import dataclass
from typing import NamedTuple

from formats.lazy_numpy import Floats, np
from formats.tensor import Box, Bytes, LazyTensor, Shape
from megaconv.errors import NotExpressible
from megaconv.values.code_tensors import Codes, Quantized, Rounding, Scales, largest_of_groups
from megaconv.values.four_bits import fp4_pairs, powers
from megaconv.values.fp8_blocks import LARGEST, e4m3, e4m3_values
from megaconv.values.mlx_groups import WORD_BITS, columns_of_groups
from megaconv.values.mlx_quantizing import packed
from megaconv.values.mxfp4 import signed_e2m1
from megaconv.values.scaled import read_floats

_BIAS = 127


class Mode(NamedTuple):
    """A mode of MLX."""

    bits: int
    size: int
    """Elements of a row that share a scale."""
    largest_code: float
    """The largest number that a code stands for."""
    largest_scale: float
    """The largest scale whose product with the largest code is finite in float32."""
    has_powers: bool
    """True if scales are powers of two."""

    @property
    def largest(self) -> float:
        """The largest magnitude of a weight."""
        return self.largest_code * self.largest_scale


MODES = {
    "mxfp4": Mode(4, 32, 6.0, 2.0**125, has_powers=True),
    "mxfp8": Mode(8, 32, LARGEST, 2.0**119, has_powers=True),
    "nvfp4": Mode(4, 16, 6.0, LARGEST, has_powers=False),
}


@dataclass(frozen=True)
class FloatGroups:
    """A weight to be quantized."""

    source: LazyTensor
    name: str
    """The tensor's name for messages."""
    mode: str

    @property
    def form(self) -> Mode:
        return MODES[self.mode]

    def numbers_and_scales(self, box: Box) -> tuple[Floats, Bytes]:
        """(numbers [rows, groups, size], stored scales [rows, groups]) of a rectangle of whole groups.

        Raises NotExpressible for a value that is too large, or NaN.
        """
        numbers = read_floats(self.source, box).reshape(box.rows, -1, self.form.size)
        largest = largest_of_groups(numbers)[:, :, 0]
        if not (largest <= self.form.largest).all():
            raise NotExpressible(
                f"{self.name}: holds values that are not finite, or beyond {self.form.largest:g}, which {self.mode} can't express; "
                "choose another mode"
            )
        wanted = largest / np.float32(self.form.largest_code)
        return numbers, _exponents(wanted) if self.form.has_powers else e4m3(wanted)

    def factors(self, scales: Bytes) -> Floats:
        """The numbers [rows, groups, 1] that stored scales stand for."""
        found = powers()[scales] if self.form.has_powers else e4m3_values(scales)
        return found[:, :, None]

    def codes(self, numbers: Floats, factors: Floats) -> Bytes:
        """The codes [rows, groups, size] of numbers, one in each byte."""
        with np.errstate(divide="ignore"):
            inverse = np.where(factors == 0, np.float32(0), np.float32(1) / factors)
        quotients = numbers * inverse
        return e4m3(quotients) if self.form.bits == 8 else signed_e2m1(quotients)

    def values(self, codes: Bytes, factors: Floats) -> Floats:
        """The numbers that a reader gets for codes, before they are rounded."""
        numbers = e4m3_values(codes) if self.form.bits == 8 else fp4_pairs()[codes, 0]
        products: Floats = numbers * factors
        return products


@dataclass(frozen=True)
class FloatCodes(Codes):
    """The codes as a tensor of words [..., cols * bits / 32]."""

    groups: FloatGroups
    errors: Rounding
    dtype: str = "uint32"

    @property
    def source(self) -> LazyTensor:
        return self.groups.source

    @property
    def bits(self) -> int:
        return self.groups.form.bits

    @property
    def group(self) -> int:
        return self.groups.form.size

    @property
    def shape(self) -> Shape:
        return columns_of_groups(self.source.shape, self.group, self.group * self.bits // WORD_BITS)

    def quantized(self, box: Box) -> Quantized:
        numbers, scales = self.groups.numbers_and_scales(box)
        factors = self.groups.factors(scales)
        codes = self.groups.codes(numbers, factors)
        values = self.groups.values(codes, factors)
        words = packed(codes.reshape(box.rows, -1), self.bits)
        return Quantized(words, values.reshape(box.rows, -1), values - numbers)


@dataclass(frozen=True)
class FloatScales(Scales):
    """The scales as a tensor [..., cols / size of a group]."""

    groups: FloatGroups
    dtype: str = "uint8"

    @property
    def group(self) -> int:
        return self.groups.form.size

    @property
    def shape(self) -> Shape:
        return columns_of_groups(self.groups.source.shape, self.group, 1)

    def scales(self, box: Box) -> Bytes:
        return self.groups.numbers_and_scales(box)[1]


def _exponents(numbers: Floats) -> Bytes:
    """The stored exponents of the smallest powers of two that are no less than numbers, from 2 ^ -127 on."""
    fractions, exponents = np.frexp(numbers)
    # frexp gives fractions from 0.5 to 1. A power of two has 0.5, and is itself the power that is looked for.
    found = exponents - (fractions == 0.5)
    found = np.where(numbers == 0, -_BIAS, np.maximum(found, -_BIAS))
    stored: Bytes = (found + _BIAS).astype(np.uint8)
    return stored
