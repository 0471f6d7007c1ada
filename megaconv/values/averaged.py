"""The weighted average of tensors: summed in float64 in the order of the models, and rounded as torch rounds a float64."""

from collections.abc import Sequence
from dataclasses import dataclass

from formats.lazy_numpy import Doubles, np
from formats.tensor import (
    ITEMSIZE,
    Box,
    Bytes,
    ComputedTensor,
    LazyTensor,
    Part,
    announce,
    box_blocks,
)
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.model.assembled import window
from megaconv.model.ir import shift_of
from megaconv.values import rounding
from megaconv.values.cast import FLOATS

_BLOCK_BYTES = 1 << 20
"""Bytes of float64 numbers that are read at a time."""
_CHUNK = 1 << 14
"""Elements that are computed at a time: intermediate results stay in the processor's cache, and in memory of the process."""


@dataclass(frozen=True)
class AveragedTensor(ComputedTensor):
    """The sum of tensors of one shape, each times its share, in the dtype of the first one (`source`).

    Where all tensors have the same bytes, so has the average. A read raises TensorMismatch for integers that differ, and
    NotExpressible if a finite number would become infinite.
    """

    others: Sequence[LazyTensor]
    shares: Sequence[float]
    """The share of `source`, then one for each of the others. They add up to 1."""
    name: str
    """The tensor's name for messages."""
    overflow: bool = False
    """True to accept infinite numbers."""

    @property
    def shift(self) -> int:
        """The number that all of the tensors have added to their values; shares of 1 together keep it."""
        return shift_of(self.source)

    def announce(self, part: Part) -> None:
        """Have the bytes of a part of all tensors fetched ahead."""
        for tensor in self._tensors:
            announce(tensor, part)

    def read_into(self, box: Box, out: Bytes) -> None:
        for part in box_blocks(box, "float64", _BLOCK_BYTES):
            np.copyto(window(out, box, part, ITEMSIZE[self.dtype]), self._averaged(part))

    @property
    def _tensors(self) -> tuple[LazyTensor, ...]:
        return (self.source, *self.others)

    def _averaged(self, box: Box) -> Bytes:
        stored = [_read(tensor, box) for tensor in self._tensors]
        first = stored[0]
        if all(
            tensor.dtype == self.dtype and np.array_equal(first, values)
            for tensor, values in zip(self._tensors, stored, strict=True)
        ):
            return first
        if self.dtype not in FLOATS:
            raise TensorMismatch(
                f"{self.name}: is {self.dtype} and differs between the models; only floating-point numbers can be averaged"
            )
        made = np.empty(first.shape, np.uint8)
        flat = [values.reshape(-1) for values in stored]
        elements = made.size // ITEMSIZE[self.dtype]
        for start in range(0, elements, _CHUNK):
            total = self._sum(flat, slice(start, min(start + _CHUNK, elements)))
            self._round(total, _part(made.reshape(-1), self.dtype, start, total.size))
        return made

    def _sum(self, stored: Sequence[Bytes], elements: slice) -> Doubles:
        """The weighted sum of some elements. stored: the bytes of all tensors."""
        total = np.zeros(elements.stop - elements.start)
        with np.errstate(over="ignore", invalid="ignore"):
            for tensor, values, share in zip(self._tensors, stored, self.shares, strict=True):
                part = _part(values, tensor.dtype, elements.start, total.size)
                numbers = rounding.numbers(part, tensor.dtype)
                total += np.multiply(numbers, share, out=numbers)
        return total

    def _round(self, total: Doubles, out: Bytes) -> None:
        """Fill `out` with the bytes of the sum in the tensor's dtype."""
        if self.dtype == "float64":
            np.copyto(out, total.view(np.uint8))
            return
        try:
            rounding.convert(
                total.view(np.uint8), "float64", out, self.dtype, overflow=self.overflow
            )
        except rounding.BeyondRange:
            raise NotExpressible(
                f"{self.name}: its average is beyond the range of {self.dtype}; give --dtype float32, or --allow-lossy overflow to "
                "make such values infinite"
            ) from None


def _part(values: Bytes, dtype: str, start: int, count: int) -> Bytes:
    """The bytes of some elements in a vector of bytes."""
    size = ITEMSIZE[dtype]
    return values[start * size : (start + count) * size]


def _read(tensor: LazyTensor, box: Box) -> Bytes:
    """The bytes of a rectangle [rows, bytes of a row]."""
    stored = np.empty((box.rows, box.cols * ITEMSIZE[tensor.dtype]), np.uint8)
    tensor.read_into(box, stored)
    return stored
