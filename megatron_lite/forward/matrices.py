"""Matrices that are read when they are used: products with blocks of rows, and rows of an embedding.

Both stand in modules of megatron_lite/models, whose own parameters then have no memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from formats.tensor import LazyTensor, matrix_shape
from megaconv.model.natives import NativeTensor
from megatron_lite.checkpoint.weights import fill, fill_rows
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import VocabEmbedding
from megatron_lite.products.product import Product, linear


@dataclass(frozen=True)
class Reader:
    """The tensors of a checkpoint, and the dtype and the device of what is read from them."""

    tensors: Mapping[str, LazyTensor]
    """Canonical tensors by name."""
    dtype: torch.dtype
    device: torch.device

    def parameter(self, native: NativeTensor, dtype: torch.dtype) -> nn.Parameter:
        """Read a whole parameter into new memory."""
        made = torch.empty(native.shape, dtype=dtype, device=self.device)
        fill(made, native, self.tensors)
        return nn.Parameter(made, requires_grad=False)

    def fill_rows(self, out: Tensor, native: NativeTensor, first: int) -> None:
        """Fill out [rows, columns] with the rows of a parameter from `first` on."""
        fill_rows(out, native, self.tensors, first)


class Buffer:
    """The memory for one block of rows. All matrices of a model share it, since one product is computed at a time."""

    def __init__(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self._elements = max(1, nbytes // dtype.itemsize)
        self._flat = torch.empty(0, dtype=dtype, device=device)

    def rows(self, columns: int) -> int:
        """Return the number of rows of a block, at least one."""
        return max(1, self._elements // columns)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Return memory [rows, columns], which is valid until the next call."""
        if self._flat.numel() < rows * columns:
            self._flat = self._flat.new_empty(rows * columns)
        return self._flat[: rows * columns].view(rows, columns)


class StreamedProduct(Product):
    """Products with a matrix that is read in blocks of rows. An input without rows reads nothing: an expert without tokens."""

    def __init__(self, native: NativeTensor, reader: Reader, buffer: Buffer) -> None:
        self.native, self.reader, self.buffer = native, reader, buffer

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in], bias [out] -> [..., out]. weight: gives the shape [out, in] alone, without memory."""
        made = x.new_empty(*x.shape[:-1], len(weight))
        if not x.numel():
            return made
        for first, block in self.blocks():
            rows = slice(first, first + len(block))
            made[..., rows] = linear(x, block, None if bias is None else bias[rows])
        return made

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear(x, weight, bias)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows of the matrix). The rows are valid until the next block."""
        rows, columns = matrix_shape(self.native.shape)
        step = self.buffer.rows(columns)
        for first in range(0, rows, step):
            block = self.buffer.matrix(min(step, rows - first), columns)
            self.reader.fill_rows(block, self.native, first)
            yield first, block


class StreamedEmbedding(VocabEmbedding):
    """An embedding that reads the rows of its tokens alone."""

    kinds: ClassVar = {"weight": Kind.VOCABULARY}

    def __init__(self, replaced: VocabEmbedding, native: NativeTensor, reader: Reader) -> None:
        """replaced: gives the shape of the table."""
        nn.Module.__init__(self)
        self.ranks, self.weight = replaced.ranks, replaced.weight
        self.native, self.reader = native, reader

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [sequence, batch] -> [sequence, batch, width]."""
        distinct, places = tokens.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        shape = len(distinct), matrix_shape(self.native.shape)[1]
        rows = torch.empty(shape, dtype=self.reader.dtype, device=self.reader.device)
        for place, token in enumerate(distinct.tolist()):
            self.reader.fill_rows(rows[place : place + 1], self.native, token)
        return F.embedding(places, rows)
