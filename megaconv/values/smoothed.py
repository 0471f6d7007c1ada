"""Multiplies the columns of a matrix before it is quantized, and the weight of the norm before it.

SmoothQuant and AWQ move factors between a matrix and its inputs: (x / f) (W * f)' = x W'. The inputs are divided either
by `pre_quant_scale`, or by the norm before the matrix, whose weight is divided instead.
"""

from dataclasses import dataclass

from formats.lazy_numpy import Floats, np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape, box_blocks
from megaconv.model.assembled import window
from megaconv.values import rounding
from megaconv.values.code_tensors import AT_ONCE
from megaconv.values.forms import Step
from megaconv.values.scaled import read_floats


@dataclass(frozen=True, eq=False)
class SmoothedTensor:
    """A matrix with its columns multiplied by factors. After each factor the values are rounded to the dtype."""

    source: LazyTensor
    steps: tuple[Step, ...]

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read_into(self, box: Box, out: Bytes) -> None:
        itemsize = ITEMSIZE[self.dtype]
        for part in box_blocks(box, "float32", 4 * AT_ONCE):
            numbers = read_floats(self.source, part)
            columns = slice(part.col0, part.col1)
            for step in self.steps:
                numbers = numbers * step.times[columns]
                if step.over is not None:
                    numbers /= step.over[columns]
                numbers = round_to(numbers, self.dtype)
            np.copyto(window(out, box, part, itemsize), rounding.rounded(numbers, self.dtype))


@dataclass(frozen=True, eq=False)
class FoldedTensor:
    """The weight or bias of a norm, multiplied by the factors of the norm's outputs."""

    source: LazyTensor
    factors: Floats
    """[hidden], float32."""
    add: int
    """The number that the norm adds to its weight."""

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read_into(self, box: Box, out: Bytes) -> None:
        factors = self.factors[box.row0 : box.row1, None]
        added = np.float32(self.add)
        numbers = (read_floats(self.source, box) + added) * factors - added
        np.copyto(out, rounding.rounded(np.ascontiguousarray(numbers), self.dtype))


def round_to(numbers: Floats, dtype: str) -> Floats:
    """The numbers, rounded to nearest even in another dtype, as float32 again."""
    if dtype == "float32":
        return numbers
    stored = rounding.rounded(np.ascontiguousarray(numbers), dtype)
    found = rounding.exact(stored.reshape(-1), dtype).astype(np.float32)
    return found.reshape(numbers.shape)
