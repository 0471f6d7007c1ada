"""DoRA: the length m of each row of an adapted matrix is trained beside the adapter.

    y = m / n · (W x + scale · B (A x)) + bias      n: the length of the row of W + scale · B A

n is a constant in the backward pass. With dropout, the adapter and m / n - 1 are for the dropped input:

    y = W x + bias + scale · B (A x') + (m / n - 1) (W x' + scale · B (A x'))

Every rank has the magnitudes of the rows of its B. Tensor ranks that shard a matrix by rows sum the squares of n.
Source: peft 0.21.2, tuners/lora/dora.py and variants.py.
"""

import torch
from torch import Tensor

from megatron_lite.models.lora.adapter import Adapter
from megatron_lite.models.lora.parameters import Sharding
from megatron_lite.parallel import comm
from megatron_lite.parallel.tensor import Matrix, TensorGroup, column_linear, row_linear
from megatron_lite.products.wide import wide

_LEAST_SQUARE = 1e-30
"""Least square of n: the length of a row of zeros divides too."""


class DoraAdapter(Adapter):
    """The adapter of one matrix, with the magnitudes of its rows."""

    fixed: Tensor | None = None
    """The result of `change` while no parameter changes; None: each pass computes it."""

    def forward(self, x: Tensor, y: Tensor, matrix: Matrix) -> Tensor:
        """Return y, the output of the matrix for x, as the adapter changes it."""
        dropped = self.dropped(x)
        term = self.term(dropped)
        made = y + term
        scaled = self._product(matrix, dropped) + term if self.drops else _unbiased(made, matrix)
        change = self.change(matrix) if self.fixed is None else self.fixed
        return made + change.to(made.dtype) * scaled

    def change(self, matrix: Matrix) -> Tensor:
        """Return m / n - 1 of each row of the matrix, 0 for rows without an adapter: float32 [out]."""
        magnitude = torch.cat([pair.magnitude for pair in self.every_pair])
        return self.placed(magnitude / self.lengths(matrix) - 1)

    @torch.no_grad()
    def change_now(self, matrix: Matrix) -> Tensor:
        """Return the change with the parameters of the moment, without a gradient. It needs no pass before it."""
        self.prepare(self.every_pair[0].magnitude.device)
        return self.change(matrix)

    @torch.no_grad()
    def lengths(self, matrix: Matrix, *, of_base: bool = False) -> Tensor:
        """Return the lengths of the rows of W + scale · B A in module order: float32 [rows with an adapter].

        of_base: of the rows of W.
        """
        squares = self.picked(matrix.product.row_squares(matrix.weight))
        if not of_base:
            squares = squares + self._added_squares(matrix)
        if self.sharding is Sharding.ROWS and self.ranks.group is not None:
            squares = comm.sum_over(squares, self.ranks.group, scatter=False)
        return squares.clamp(min=_LEAST_SQUARE).sqrt()

    def _added_squares(self, matrix: Matrix) -> Tensor:
        """Return the difference that scale · B A makes to the squares of lengths, without a matrix of the size of W."""
        pairs = self.every_pair
        every_a = torch.cat([pair.lora_a for pair in pairs])
        products = self.picked(matrix.product.plain(every_a, matrix.weight))
        by_pair = torch.split(products, self.options.rank)
        found, row = [], 0
        for pair, with_all_rows in zip(pairs, by_pair, strict=True):
            end = row + len(pair.lora_b)
            a_w = wide(with_all_rows[:, row:end])
            found.append(_added(wide(pair.lora_a), wide(pair.lora_b) * self.options.scale, a_w))
            row = end
        return torch.cat(found)

    def _product(self, matrix: Matrix, x: Tensor) -> Tensor:
        """Return W x."""
        if self.sharding is Sharding.ROWS:
            return row_linear(x, matrix.weight, None, self.ranks, matrix.product)
        ranks = self.ranks if self.sharding is Sharding.COLUMNS else TensorGroup()
        return column_linear(x, matrix.weight, None, ranks, matrix.product)


def _added(a: Tensor, b: Tensor, a_w: Tensor) -> Tensor:
    """Return |w + b A|² - |w|² = b · (2 A w + A A' b) of each row w of W: [rows].

    a: A [r, in]. b: the rows of B, with the scale, [rows, r]. a_w: A w of each row, [r, rows].
    """
    with_itself = b @ (a @ a.t())
    return (b * (2 * a_w.t() + with_itself)).sum(1)


def _unbiased(y: Tensor, matrix: Matrix) -> Tensor:
    return y if matrix.bias is None else y - matrix.bias
