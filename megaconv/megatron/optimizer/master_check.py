"""Whether an optimizer's fp32 copies belong to the weights: rounded to the weights' dtype they are these, bit for bit.

An optimizer's tensors carry no names. What finds out that one was taken for another is this comparison, made while the
master is read, so that it costs no pass of its own.
"""

from dataclasses import dataclass

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape
from megaconv.engine.rounding import rounded
from megaconv.engine.shifted import add
from megaconv.errors import TensorMismatch
from megaconv.model.ir import shift_of

_COMPARED_BYTES = 1 << 18
"""Of the master, at a time: so that what is made of it stays in the processor's cache."""


@dataclass(frozen=True)
class CheckedMaster:
    """A master that is compared with its weight block by block; reading it raises TensorMismatch where they differ."""

    name: str
    master: LazyTensor
    weight: LazyTensor
    """bfloat16 or float16."""

    @property
    def shape(self) -> Shape:
        return self.master.shape

    @property
    def dtype(self) -> str:
        return self.master.dtype

    @property
    def shift(self) -> int:
        return shift_of(self.master)

    def read_into(self, box: Box, out: Bytes) -> None:
        self.master.read_into(box, out)
        step = max(1, _COMPARED_BYTES // max(1, out.shape[1]))
        for row in range(0, box.rows, step):
            part = box._replace(row0=box.row0 + row, row1=min(box.row0 + row + step, box.row1))
            self._compare(part, out[row : row + step])

    def _compare(self, box: Box, master: Bytes) -> None:
        weight = np.empty((box.rows, box.cols * ITEMSIZE[self.weight.dtype]), np.uint8)
        self.weight.read_into(box, weight)
        if not self._belongs(np.ascontiguousarray(master), weight):
            raise TensorMismatch(
                f"{self.name}: the optimizer's fp32 copy does not round to the weight, so the optimizer's tensors can't be trusted. "
                "Either the weights were changed after the checkpoint was saved, or the optimizer was saved wrongly (Megatron core "
                "0.15 to 0.19 does so with fully_reshardable and several buckets); --no-optimizer converts the weights alone"
            )

    def _belongs(self, master: Bytes, weight: Bytes) -> bool:
        """As they are stored, or less what both were stored with: a weight that was converted exactly is on a coarser grid there."""
        if _rounds_to(master, weight, self.weight.dtype):
            return True
        if not self.shift:
            return False
        plain = add(master, "float32", -self.shift), add(weight, self.weight.dtype, -self.shift)
        return _rounds_to(*plain, self.weight.dtype)


def _rounds_to(master: Bytes, weight: Bytes, dtype: str) -> bool:
    made = rounded(master.view(np.float32), dtype)
    return np.array_equal(made, weight) or _only_nan(made, weight, dtype)


def _only_nan(made: Bytes, weight: Bytes, dtype: str) -> bool:
    """Whether all that differs is the bits of values that are not a number: these round in many ways."""
    ours, theirs = made.view(np.uint16), weight.view(np.uint16)
    magnitude, infinite = 0x7FFF, 0x7C00 if dtype == "float16" else 0x7F80
    differs = ours != theirs
    return bool(np.all(((ours & magnitude) > infinite)[differs] & ((theirs & magnitude) > infinite)[differs]))
