"""Rows of single tokens that are trained beside adapters, in a frozen embedding and head: peft's trainable_token_indices.

Every tensor rank has all trained rows. Each computes a share of their gradient:

| place     | without sequence parallelism | with it                      |
|-----------|------------------------------|------------------------------|
| embedding | the first rank: all tokens   | each rank: its own tokens    |
| head      | each rank: the rows that its part of the matrix has         |
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models.loss import LearnedRows
from megatron_lite.parallel.parameter_kinds import Kind
from megatron_lite.parallel.tensor import TensorGroup


class _WithoutGradient(torch.autograd.Function):
    """The identity with a gradient of 0. All ranks keep the same graph, and so the same collectives."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


class TokenRows(nn.Module):
    """The trained rows of an embedding or a head. `rows` has the dtype of the model, [tokens, hidden]."""

    kinds: ClassVar = {"rows": Kind.OF_HEADS}

    def __init__(self, tokens: tuple[int, ...], hidden: int, ranks: TensorGroup) -> None:
        """tokens: in ascending order."""
        super().__init__()
        self.tokens, self.ranks = tokens, ranks
        self.rows = nn.Parameter(torch.empty(len(tokens), hidden))
        self._ids: Tensor | None = None
        self._places: tuple[Tensor, Tensor] | None = None

    def embedded(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return embeddings with the trained rows of their tokens.

        x: the embeddings of the frozen table, [sequence (/ tp), batch, hidden]. tokens: int64 [sequence, batch].
        """
        ids = self._ids_on(x.device)
        own = self.ranks.own_part(tokens).contiguous()
        places = torch.searchsorted(ids, own).clamp_(max=len(ids) - 1)
        is_trained = ids[places] == own
        rows: Tensor = self.rows
        if self.ranks.rank and not self.ranks.sequence:
            rows = _WithoutGradient.apply(rows)  # type: ignore[no-untyped-call]
        return torch.where(is_trained.unsqueeze(-1), F.embedding(places, rows), x)

    def written_into(self, matrix: Tensor) -> LearnedRows:
        """Write the rows into this rank's part of the frozen matrix, and return their places.

        matrix [padded vocabulary / tp, hidden].
        """
        held, places = self._places_in(matrix)
        # `data` has a version of its own. Sharded matrices share one with others in their buffer, which autograd has kept.
        matrix.data.index_copy_(0, places, self.rows.detach().index_select(0, held))
        return LearnedRows(self.rows, held, places)

    def _ids_on(self, device: torch.device) -> Tensor:
        if self._ids is None or self._ids.device != device:
            with torch.inference_mode(False):  # a training pass may use this tensor later
                self._ids = torch.tensor(self.tokens, device=device)
        return self._ids

    def _places_in(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return (numbers of the trained rows that this rank's part of the matrix has, their places in it)."""
        if self._places is None or self._places[0].device != matrix.device:
            first = self.ranks.rank * len(matrix)
            held = [
                (number, token - first)
                for number, token in enumerate(self.tokens)
                if first <= token < first + len(matrix)
            ]
            with torch.inference_mode(False):
                both = torch.tensor(held, dtype=torch.int64, device=matrix.device).view(-1, 2)
                numbers, places = both.t().contiguous()
            self._places = numbers, places
        return self._places
