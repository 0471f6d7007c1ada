"""The tensors of a mixture that is made from a dense model: a new router, and parts of an MLP's matrices."""

from dataclasses import dataclass

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, ComputedTensor, Shape
from megaconv.errors import NotExpressible
from megaconv.values import rounding
from megaconv.values.random_numbers import uniform
from megaconv.values.scaled import read_bytes

DEVIATION = 0.02
"""The standard deviation of a new router's weights: that of Megatron's and of transformers' new weights."""


@dataclass(frozen=True)
class RouterTensor:
    """The weights of a new router [experts, hidden]: random numbers, the same on every machine.

    They are uniform, since normal ones need functions that processors round differently. Experts that are parts of one MLP
    have equal rows, so that a token gets all parts or none.
    """

    shape: Shape
    dtype: str
    name: str
    """The tensor's name, on which the numbers depend."""
    parts: int = 1
    """Experts that an MLP is cut into. They follow each other."""

    def read_into(self, box: Box, out: Bytes) -> None:
        rows = np.arange(box.row0, box.row1, dtype=np.uint64) // np.uint64(self.parts)
        cols = np.arange(box.col0, box.col1, dtype=np.uint64)
        places = rows[:, None] * np.uint64(self.shape[1]) + cols
        limit = DEVIATION * 3**0.5
        values = (2 * uniform(places, self.name) - 1) * limit
        np.copyto(out, rounding.of_doubles(values, self.dtype, overflow=False))


@dataclass(frozen=True)
class PartTensor(ComputedTensor):
    """Some rows and columns of a matrix, times a number."""

    box: Box
    """The rows and columns."""
    name: str
    """The tensor's name for messages."""
    factor: int = 1

    @property
    def shape(self) -> Shape:
        return self.box.rows, self.box.cols

    def read_into(self, box: Box, out: Bytes) -> None:
        row, col = self.box.row0, self.box.col0
        stored = Box(row + box.row0, row + box.row1, col + box.col0, col + box.col1)
        if self.factor == 1:
            self.source.read_into(stored, out)
            return
        found = read_bytes(self.source, stored, ITEMSIZE[self.dtype])
        values = rounding.numbers(found.reshape(-1), self.dtype).reshape(box.rows, box.cols)
        try:
            made = rounding.of_doubles(values * self.factor, self.dtype, overflow=False)
        except rounding.BeyondRange:
            raise NotExpressible(
                f"{self.name}: {self.factor} times a weight is beyond the range of {self.dtype}; convert the "
                "model to another dtype first (--dtype bf16)"
            ) from None
        np.copyto(out, made)
