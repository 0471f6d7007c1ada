"""A tensor that several tensors are blended to: computed in float64, and rounded once, as torch rounds a float64."""

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
    matrix_shape,
)
from megaconv.errors import NotExpressible, TensorMismatch
from megaconv.model.assembled import window
from megaconv.model.ir import shift_of
from megaconv.values import rounding
from megaconv.values.blends import Blend, Run
from megaconv.values.cast import FLOATS
from megaconv.values.scaled import read_bytes

_BLOCK_BYTES = 1 << 20
"""Bytes of float64 numbers that are read at a time."""
_CHUNK = 1 << 14
"""Elements that are computed at a time: intermediate results stay in the processor's cache, and in memory of the process."""


@dataclass(frozen=True)
class AveragedTensor(ComputedTensor):
    """The blend of tensors of one shape, in the dtype of the first one (`source`).

    Where all tensors have the same bytes, so has a blend that keeps equal numbers. A read raises TensorMismatch for
    integers that differ, and NotExpressible if a finite number would become infinite.
    """

    others: Sequence[LazyTensor]
    blend: Blend
    name: str
    """The tensor's name for messages."""
    overflow: bool = False
    """True to accept infinite numbers."""

    @property
    def shift(self) -> int:
        """The number that all of the tensors have added to their values. The blend keeps it, or there is none."""
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
        stored = [read_bytes(each, box, ITEMSIZE[each.dtype]) for each in self._tensors]
        first = stored[0]
        are_equal = all(
            tensor.dtype == self.dtype and np.array_equal(first, values)
            for tensor, values in zip(self._tensors, stored, strict=True)
        )
        is_float = self.dtype in FLOATS
        if are_equal and (not is_float or self.blend.keeps_equal):
            return first
        if not is_float:
            raise TensorMismatch(
                f"{self.name}: is {self.dtype} and differs between the models; only floating-point numbers can be averaged"
            )
        made = np.empty(first.shape, np.uint8)
        flat = [values.reshape(-1) for values in stored]
        elements = made.size // ITEMSIZE[self.dtype]
        for start in range(0, elements, _CHUNK):
            run = Run(box, start, min(start + _CHUNK, elements), matrix_shape(self.shape)[1])
            total = self._blended(flat, run)
            self._round(total, _part(made.reshape(-1), self.dtype, start, total.size))
        return made

    def _blended(self, stored: Sequence[Bytes], run: Run) -> Doubles:
        """The blend of a run of elements. stored: the bytes of all tensors."""
        with np.errstate(over="ignore", invalid="ignore"):
            total = self.blend.blended(self._numbers(stored, run), run)
        wrong = ~np.isfinite(total)
        if wrong.any() and not self.overflow:
            # A blend may change the numbers that it is given.
            for numbers in self._numbers(stored, run):
                wrong &= np.isfinite(numbers)
            if wrong.any():
                raise self._beyond("float64")
        return total

    def _numbers(self, stored: Sequence[Bytes], run: Run) -> list[Doubles]:
        """A run of elements of each tensor as float64."""
        count = run.stop - run.start
        return [
            rounding.numbers(_part(values, tensor.dtype, run.start, count), tensor.dtype)
            for tensor, values in zip(self._tensors, stored, strict=True)
        ]

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
            raise self._beyond(self.dtype) from None

    def _beyond(self, dtype: str) -> NotExpressible:
        """Return the error of a number that is beyond the range of a dtype."""
        remedy = (
            "give --dtype float32"
            if ITEMSIZE[dtype] < ITEMSIZE["float32"]
            else "give smaller shares"
        )
        return NotExpressible(
            f"{self.name}: its average is beyond the range of {dtype}; {remedy}, or --allow-lossy overflow to make such values "
            "infinite"
        )


def _part(values: Bytes, dtype: str, start: int, count: int) -> Bytes:
    """The bytes of some elements in a vector of bytes."""
    size = ITEMSIZE[dtype]
    return values[start * size : (start + count) * size]
