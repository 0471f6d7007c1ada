"""Checks that an optimizer's fp32 masters belong to the weights: rounded to the weights' dtype, they must be equal.

An optimizer's tensors have no names. This comparison detects a tensor that was mistaken for another one. It is made
while the master is read, so it needs no extra pass.
"""

from dataclasses import dataclass

from formats.lazy_numpy import np
from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape
from megaconv.errors import TensorMismatch
from megaconv.model.ir import shift_of
from megaconv.values.rounding import rounded
from megaconv.values.shifted import add

OF_MEGATRON = (
    "Either the weights were changed after the checkpoint was saved, or the optimizer was saved wrongly (Megatron core "
    "0.15 to 0.19 does so with fully_reshardable and several buckets); --no-optimizer converts the weights alone"
)
"""The possible causes for a Megatron checkpoint, and what to do."""

_COMPARED_BYTES = 1 << 18
"""Bytes of the master that are compared at a time: intermediate results then stay in the processor's cache."""


@dataclass(frozen=True)
class CheckedMaster:
    """A master that is compared with its weight block by block. A read raises TensorMismatch if they differ."""

    name: str
    master: LazyTensor
    weight: LazyTensor
    """The weight: bfloat16, float16 or float32."""
    advice: str = OF_MEGATRON
    """Sentences for the message: the possible causes, and what to do."""

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
            differs = (
                "is not the weight"
                if self.weight.dtype == "float32"
                else "does not round to the weight"
            )
            raise TensorMismatch(
                f"{self.name}: the optimizer's fp32 copy {differs}, so the optimizer's tensors can't be trusted. {self.advice}"
            )

    def _belongs(self, master: Bytes, weight: Bytes) -> bool:
        """True if the master belongs to the weight, either as stored or with the shift removed from both.

        A weight that was converted exactly has a coarser grid without the shift.
        """
        if _rounds_to(master, weight, self.weight.dtype):
            return True
        if not self.shift:
            return False
        plain = add(master, "float32", -self.shift), add(weight, self.weight.dtype, -self.shift)
        return _rounds_to(*plain, self.weight.dtype)


def _rounds_to(master: Bytes, weight: Bytes, dtype: str) -> bool:
    made = rounded(master.view(np.float32), dtype)
    return np.array_equal(made, weight) or (dtype != "float32" and _only_nan(made, weight, dtype))


def _only_nan(made: Bytes, weight: Bytes, dtype: str) -> bool:
    """True if only the bits of NaNs differ, because NaNs can be rounded in many ways."""
    ours, theirs = made.view(np.uint16), weight.view(np.uint16)
    magnitude, infinite = 0x7FFF, 0x7C00 if dtype == "float16" else 0x7F80
    differs = ours != theirs
    return bool(
        np.all(
            ((ours & magnitude) > infinite)[differs] & ((theirs & magnitude) > infinite)[differs]
        )
    )
