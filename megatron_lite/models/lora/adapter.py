"""The computation of a matrix's adapter, and how tensor ranks shard it.

Between A and B, tensor ranks exchange r numbers a token:

| matrix sharded by | A                    | B            | forward            | backward        |
|-------------------|----------------------|--------------|--------------------|-----------------|
| columns           | whole on every rank  | by rows as W | none (gathered)    | summed          |
| rows              | by columns as W      | whole        | summed (scattered) | none (gathered) |
| experts           | whole, of one expert | the same     | none               | none            |
| not at all        | whole on every rank  | the same     | none               | none            |

Words in brackets hold with sequence parallelism. The gradient of a whole matrix is that of the rank's tokens: all
tokens, or under sequence parallelism the rank's own.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models import rng
from megatron_lite.models.lora.parameters import Sharding
from megatron_lite.models.lora.shares import Share
from megatron_lite.parallel import comm
from megatron_lite.parallel.tensor import Matrix, TensorGroup
from megatron_lite.settings.options import LoRA


class Pair(nn.Module):
    """This rank's part of one module's adapter."""

    in_float32: ClassVar = ("magnitude",)

    def __init__(self, share: Share, options: LoRA, sharding: Sharding) -> None:
        super().__init__()
        kind_a, kind_b = sharding.value
        self.kinds = {"lora_a": kind_a, "lora_b": kind_b, "magnitude": kind_b}
        self.lora_a = nn.Parameter(torch.empty(options.rank, share.width))
        self.lora_b = nn.Parameter(torch.empty(share.out, options.rank))
        if options.dora:
            self.magnitude = nn.Parameter(torch.empty(share.out))


class _Placed(torch.autograd.Function):
    """Columns at their places among `out` columns; the other columns are 0. index_copy would keep its input for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, out: int) -> Tensor:
        ctx.save_for_backward(index)
        return x.new_zeros(*x.shape[:-1], out).index_copy(-1, index, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(-1, index), None, None


class Adapter(nn.Module):
    """The adapter of one matrix: the adapters of all modules that the matrix contains parts of."""

    def __init__(
        self,
        shares: Sequence[Share],
        out: int,
        options: LoRA,
        sharding: Sharding,
        ranks: TensorGroup,
        place: tuple[int, int],
    ) -> None:
        """out: rows of the rank's matrix; some may have no adapter. place: (layer, index in the layer), for dropout."""
        super().__init__()
        self.options = options
        self.sharding = sharding
        self.out = out
        self.ranks = TensorGroup() if sharding is Sharding.EXPERTS else ranks
        layer, number = place
        stream = rng.LORA + number
        if sharding is Sharding.ROWS:
            stream += rng.LORA
        self.at = rng.At(layer, stream)
        self.pairs = nn.ModuleDict()
        self.rows: list[int] = []
        for share in shares:
            self.pairs[share.module.key] = Pair(share, options, sharding)
            for run in share.rows:
                self.rows += run.local
        # The forward pass never reads the rows: a matrix may have 30,000, and compiled code would compare each of them.
        self._is_in_order = self.rows == list(range(out))
        self.seed: rng.Seed | None = None
        """The seed of the layer's current pass; None: no dropout."""
        self._index: Tensor | None = None

    def prepare(self, device: torch.device) -> None:
        """Put the order of the rows on the device. Call it before the forward pass, outside compiled code."""
        if self._is_in_order or (self._index is not None and self._index.device == device):
            return
        with torch.inference_mode(False):  # a training pass may use this tensor later
            self._index = torch.tensor(self.rows, device=device)

    @property
    def every_pair(self) -> list[Pair]:
        """The pairs of all modules, in module order."""
        return [pair for pair in self.pairs.values() if isinstance(pair, Pair)]

    def forward(self, x: Tensor, y: Tensor, matrix: Matrix) -> Tensor:
        """Return y, the output of the matrix for x, as the adapter changes it."""
        return y + self.term(self.dropped(x))

    def term(self, x: Tensor) -> Tensor:
        """Return scale · B (A x), in the shape of the matrix's product with x."""
        pairs = self.every_pair
        inner = F.linear(x, torch.cat([pair.lora_a for pair in pairs])) * self.options.scale
        group, sequence = self.ranks.group, self.ranks.sequence
        if self.sharding is Sharding.COLUMNS:
            inner = comm.shared_over(inner, group, gather=sequence)
        elif self.sharding is Sharding.ROWS and group is not None:
            inner = comm.sum_over(inner, group, scatter=sequence)
        parts = torch.split(inner, self.options.rank, -1)
        made = torch.cat(
            [F.linear(part, pair.lora_b) for part, pair in zip(parts, pairs, strict=True)], -1
        )
        return self.placed(made)

    def picked(self, of_rows: Tensor) -> Tensor:
        """Reorder numbers of the matrix's rows, the last axis, to module order, without rows that have no adapter."""
        if self._is_in_order:
            return of_rows
        assert self._index is not None, "the layer's hook calls prepare"
        return of_rows.index_select(-1, self._index)

    def placed(self, made: Tensor) -> Tensor:
        """Reorder outputs from module order to the matrix's row order, with 0 for rows without an adapter."""
        if self._is_in_order:
            return made
        assert self._index is not None, "the layer's hook calls prepare"
        placed: Tensor = _Placed.apply(made, self._index, self.out)  # type: ignore[no-untyped-call]
        return placed

    @property
    def drops(self) -> bool:
        """True if the current pass has dropout."""
        return self.seed is not None and self.options.dropout > 0

    def dropped(self, x: Tensor) -> Tensor:
        """Return x with dropout, or x itself in a pass without."""
        if self.seed is None or not self.drops:
            return x
        probability, ranks, columns = self.options.dropout, self.ranks, None
        if self.sharding is Sharding.ROWS:
            # A row-sharded matrix gets the whole sequence but only this rank's columns.
            ranks, columns = TensorGroup(), self.ranks
        dropped: Tensor = self.seed.drop(x, probability, self.at, ranks, columns)
        return dropped
