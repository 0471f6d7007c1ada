"""Whether an optimizer's fp32 copies belong to the weights: rounded to the weights' dtype they are these, bit for bit.

An optimizer's tensors carry no names. What finds out that one was taken for another is this comparison, made while the
master is read, so that it costs no pass of its own.
"""

from dataclasses import dataclass

import numpy as np

from formats.tensor import ITEMSIZE, Box, Bytes, LazyTensor, Shape
from megaconv.errors import TensorMismatch


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

    def read_into(self, box: Box, out: Bytes) -> None:
        self.master.read_into(box, out)
        weight = np.empty((box.rows, box.cols * ITEMSIZE[self.weight.dtype]), np.uint8)
        self.weight.read_into(box, weight)
        values = np.ascontiguousarray(out).view(np.float32)
        if not np.array_equal(rounded(values, self.weight.dtype).view(np.uint8), weight) and not _only_nan(
            values, weight, self.weight.dtype
        ):
            raise TensorMismatch(
                f"{self.name}: the optimizer's fp32 copy does not round to the weight, so the optimizer's tensors can't be trusted. "
                "Either the weights were changed after the checkpoint was saved, or the optimizer was saved wrongly (Megatron core "
                "0.15 to 0.19 does so with fully_reshardable and several buckets); --no-optimizer converts the weights alone"
            )


def rounded(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], dtype: str) -> Bytes:
    """fp32 to bfloat16 or float16, to nearest even, as bytes of the same number of rows."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint8)
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16).view(np.uint8)


def _only_nan(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], weight: Bytes, dtype: str) -> bool:
    """Whether all that differs is the bits of values that are not a number: these round in many ways."""
    differs = rounded(values, dtype).view(np.uint16) != weight.view(np.uint16)
    exponent, fraction = (0x7C00, 0x03FF) if dtype == "float16" else (0x7F80, 0x007F)
    stored = weight.view(np.uint16)
    not_numbers = ((stored & exponent) == exponent) & ((stored & fraction) != 0)
    return bool(np.all(not_numbers[differs] & np.isnan(values)[differs]))
