"""Passes through all layers of a network whose tokens don't all count: the last one of a text and padding predict nothing."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron_lite.engine import Engine
from megatron_lite.forward.rows import counted_tokens
from megatron_lite.forward.walk import walk
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.build_plan import ExpertRanks
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.moe.counting import RowNumbers
from megatron_lite.models.moe.dispatch import Compute
from megatron_lite.models.moe.experts import Mixture


@dataclass
class Counted:
    """The tokens that count while a layer computes."""

    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    """bool [tokens, batch]."""

    def rows(self) -> Tensor:
        """Return bool [tokens x batch]: the same for matrices that read each token."""
        return self.tokens.flatten()

    def run_all(self, engine: Engine, passes: Iterable[Microbatch]) -> int:
        """Compute all passes without gradients. Return the number of tokens that count."""
        tokens = 0
        with torch.inference_mode():
            for batch in passes:
                tokens += int(counted_tokens(batch).sum())
                self._run(engine, batch)
        return tokens

    def _run(self, engine: Engine, batch: Microbatch) -> None:
        """Compute all layers of a network in one process, and then those that predict further tokens."""
        (network,) = engine.chunks
        self.tokens = of_pass = counted_tokens(batch)
        (last,) = deque(walk(network, engine.make_pass(batch)), maxlen=1)
        if not isinstance(network, ModelChunk) or network.mtp is None:
            return
        assert network.embedding is not None
        hidden = last.hidden
        for ahead, layer in enumerate(network.mtp.layers, 1):
            # The last tokens of a row get the row's first ones. They don't count, and attention of the others doesn't reach them.
            later = engine.make_pass(replace(batch, tokens=batch.tokens.roll(-ahead, 1)))
            self.tokens = F.pad(of_pass[ahead:], (0, 0, 0, ahead))
            hidden = layer(network.embedding(later), hidden, later)


class CountedDispatch(ABC):
    """Stands in place of a mixture's dispatch, and sees the rows of the mixture's experts.

    Tokens that don't count get weights of 0. No later layer needs the outputs of these tokens.
    """

    def __init__(self, mixture: Mixture, counted: Counted) -> None:
        self._counted = counted
        self._dispatch = mixture.dispatch
        setattr(mixture, "dispatch", self)  # noqa: B010

    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        count: int,
        ranks: ExpertRanks,
        compute: Compute,
        numbers: RowNumbers,
    ) -> Tensor:
        """See dispatch.by_exchange."""
        counted = self._counted.rows().to(weights.device)
        self.see_choices(chosen[counted], count)

        def computed(rows: Tensor, scales: Tensor, counts: list[int]) -> Tensor:
            return self.compute(compute, rows, scales, counts)

        counting = weights * counted.unsqueeze(1)
        return self._dispatch(x, counting, chosen, count, ranks, computed, numbers)

    def see_choices(self, chosen: Tensor, count: int) -> None:
        """See the experts [tokens, per token] of the tokens that count. count: of all experts."""
        return

    @abstractmethod
    def compute(self, compute: Compute, rows: Tensor, scales: Tensor, counts: list[int]) -> Tensor:
        """Compute the experts: see Experts.forward. Rows of tokens that don't count have the scale 0."""
