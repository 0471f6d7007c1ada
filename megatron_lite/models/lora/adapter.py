"""What is computed beside a matrix, and how tensor ranks share it.

| matrix sharded by | A                        | B               | between them, r numbers a token pass among the tensor ranks       |
|-------------------|--------------------------|-----------------|-------------------------------------------------------------------|
| columns           | whole on every rank      | by rows as W is | forward none (with sequence parallelism gathered), backward summed |
| rows              | by columns as W is       | whole           | summed (scattered) forward, backward none (gathered)               |
| experts           | whole, of one expert     | the same        | none                                                               |
| not at all        | whole on every rank      | the same        | none                                                               |

So a whole matrix has the gradient of what its rank sees: all tokens, or under sequence parallelism its own.
"""

from collections.abc import Sequence
from enum import Enum

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron_lite.models import rng
from megatron_lite.models.lora.shares import Share
from megatron_lite.parallel import comm
from megatron_lite.parallel.kinds import Kind
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.settings.options import LoRA


class Sharding(Enum):
    """Of a matrix, and so of its adapter: the kinds of A and B."""

    COLUMNS = Kind.OF_TOKENS, Kind.SHARDED
    ROWS = Kind.SHARDED, Kind.OF_TOKENS
    EXPERTS = Kind.EXPERT, Kind.EXPERT
    NOT_AT_ALL = Kind.OF_TOKENS, Kind.OF_TOKENS


class Pair(nn.Module):
    """The adapter of one module, as far as this rank has it."""

    def __init__(self, share: Share, rank: int, sharding: Sharding) -> None:
        super().__init__()
        kind_a, kind_b = sharding.value
        self.kinds = {"lora_a": kind_a, "lora_b": kind_b}
        self.lora_a = nn.Parameter(torch.empty(rank, share.width))
        self.lora_b = nn.Parameter(torch.empty(share.out, rank))


class Adapter(nn.Module):
    """Of one matrix: those of all modules that it has a part of."""

    def __init__(
        self,
        shares: Sequence[Share],
        out: int,
        options: LoRA,
        sharding: Sharding,
        ranks: TensorGroup,
        place: tuple[int, int],
    ) -> None:
        """out: rows of the rank's matrix, of which some may have no adapter. place: layer, and number in it; for dropout."""
        super().__init__()
        self.options, self.sharding, self.out = options, sharding, out
        self.ranks = TensorGroup() if sharding is Sharding.EXPERTS else ranks
        layer, number = place
        of_rank = rng.LORA * (1 + self.ranks.rank) if sharding is Sharding.ROWS else 0
        self.at = rng.At(layer, rng.LORA + number + of_rank)
        self.pairs = nn.ModuleDict({share.module.key: Pair(share, options.rank, sharding) for share in shares})
        self.rows = [row for share in shares for run in share.rows for row in range(run.local, run.local + run.size)]
        self.seed: rng.Seed | None = None
        """Of the pass that the layer is in; None: nothing is dropped."""
        self._index: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the matrix's product with x, of the same shape."""
        pairs = [pair for pair in self.pairs.values() if isinstance(pair, Pair)]
        inner = F.linear(self._dropped(x), torch.cat([pair.lora_a for pair in pairs])) * self.options.scale
        if self.ranks.group is not None and self.sharding is not Sharding.NOT_AT_ALL:
            whole = self.sharding is Sharding.COLUMNS
            across = comm.shared_over(inner, self.ranks.group, gather=self.ranks.sequence) if whole else None
            inner = comm.sum_over(inner, self.ranks.group, scatter=self.ranks.sequence) if across is None else across
        parts = torch.split(inner, self.options.rank, -1)
        made = torch.cat([F.linear(part, pair.lora_b) for part, pair in zip(parts, pairs, strict=True)], -1)
        return self._placed(made)

    def _placed(self, made: Tensor) -> Tensor:
        """Module by module -> in the order of the matrix's rows, 0 where there is no adapter."""
        if self.rows == list(range(self.out)):
            return made
        if self._index is None or self._index.device != made.device:
            self._index = torch.tensor(self.rows, device=made.device)
        return made.new_zeros(*made.shape[:-1], self.out).index_copy(-1, self._index, made)

    def _dropped(self, x: Tensor) -> Tensor:
        if self.seed is None or not self.options.dropout:
            return x
        whole = self.sharding is Sharding.ROWS  # the whole sequence, columns of its own
        dropped: Tensor = self.seed.drop(x, self.options.dropout, self.at, TensorGroup() if whole else self.ranks)
        return dropped
