"""A LazyTensor over values in memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from formats.tensor import Box, Bytes, Shape, matrix_shape


@dataclass(frozen=True)
class HeldTensor:
    """A LazyTensor over a matrix or vector that is already in memory."""

    values: Tensor
    """float32 [rows, cols] or [rows]."""
    dtype: str = "float32"

    @property
    def shape(self) -> Shape:
        return tuple(self.values.shape)

    def read_into(self, box: Box, out: Bytes) -> None:
        matrix = self.values.view(matrix_shape(self.shape))
        part = matrix[box.row0 : box.row1, box.col0 : box.col1].contiguous()
        out[:] = part.view(torch.uint8).numpy().reshape(out.shape)
