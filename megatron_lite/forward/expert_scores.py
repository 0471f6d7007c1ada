"""Measures the part of experts in the output of a mixture. Experts of the smallest part can be left out of a model.

score of an expert    the mean of |weight of the router x output of the expert| over the tokens that choose it
                      (REAP, arXiv:2510.13999)
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from formats.errors import CorruptCheckpoint
from megatron_lite.engine import Engine
from megatron_lite.forward.rows import counted_tokens
from megatron_lite.forward.walk import walk
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.build_plan import ExpertRanks
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.moe.counting import RowNumbers, count_rows
from megatron_lite.models.moe.dispatch import Compute
from megatron_lite.models.moe.experts import Mixture


@dataclass(frozen=True)
class LayerScores:
    """Sums over all tokens, for each expert of a layer."""

    tokens: Sequence[int]
    """The number of tokens that choose the expert."""
    outputs: Sequence[float]
    """The sum of the norms of its weighted outputs."""

    @property
    def scores(self) -> list[float]:
        """The mean norm of each expert's weighted output; 0 for an expert that no token chooses."""
        pairs = zip(self.tokens, self.outputs, strict=True)
        return [output / tokens if tokens else 0.0 for tokens, output in pairs]


@dataclass(frozen=True)
class ExpertScores:
    """The scores of all experts."""

    layers: Mapping[str, LayerScores]
    """By the layers' canonical names, such as `layers.3` or `mtp.0`."""
    tokens: int


def measure(engine: Engine, passes: Sequence[Microbatch]) -> ExpertScores:
    """Compute all layers of a mixture in one process. Raises CorruptCheckpoint for values that are not finite."""
    counted = _Counted()
    watched = dict(_watched(engine, counted))
    tokens = 0
    with torch.inference_mode():
        for batch in passes:
            tokens += int(counted_tokens(batch).sum())
            _run(engine, batch, counted)
    layers = {layer: watch.scores(layer) for layer, watch in watched.items()}
    return ExpertScores(layers, tokens)


@dataclass
class _Counted:
    """The tokens that count while a layer computes."""

    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    """bool [tokens, batch]."""


class _Watch:
    """Stands in place of a mixture's dispatch, and adds up the outputs of the mixture's experts."""

    def __init__(self, mixture: Mixture, counted: _Counted) -> None:
        self._counted = counted
        self._dispatch = mixture.dispatch
        self._tokens = torch.zeros(mixture.count, dtype=torch.int64)
        self._outputs = torch.zeros(mixture.count, dtype=torch.float64)

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
        """See dispatch.by_exchange. Tokens that don't count get weights of 0, and so they add nothing to the sums.

        No later layer needs the outputs of these tokens: the last token of a text, and padding behind it.
        """
        counted = self._counted.tokens.flatten().to(weights.device)
        self._tokens += count_rows(chosen[counted].flatten(), count + 1)[:count].cpu()

        def computed(rows: Tensor, scales: Tensor, counts: list[int]) -> Tensor:
            made = compute(rows, scales, counts)
            norms = made.float().norm(dim=-1).double()
            self._outputs += torch.stack([part.sum() for part in norms.split(counts)]).cpu()
            return made

        counting = weights * counted.unsqueeze(1)
        return self._dispatch(x, counting, chosen, count, ranks, computed, numbers)

    def scores(self, layer: str) -> LayerScores:
        """Return the sums. layer: its name, for messages. Raises CorruptCheckpoint if they are not finite."""
        if not self._outputs.isfinite().all():
            raise CorruptCheckpoint(
                f"{layer} computes NaN or infinite values, so experts can't be ranked; `megaconv inspect --stats` shows the "
                "tensors that have some"
            )
        return LayerScores(self._tokens.tolist(), self._outputs.tolist())


def _watched(engine: Engine, counted: _Counted) -> Iterator[tuple[str, _Watch]]:
    """Watch all mixtures. Yield the canonical name of each mixture's layer."""
    (network,) = engine.chunks
    names = {info.name: next(iter(info.native.parts)) for info in engine.infos[0]}
    for path, module in network.named_modules():
        if isinstance(module, Mixture):
            watch = _Watch(module, counted)
            setattr(module, "dispatch", watch)  # noqa: B010
            yield names[f"{path}.router.weight"].removesuffix(".mlp.router.weight"), watch


def _run(engine: Engine, batch: Microbatch, counted: _Counted) -> None:
    """Compute all layers, and then those that predict further tokens."""
    (network,) = engine.chunks
    counted.tokens = of_pass = counted_tokens(batch)
    (last,) = deque(walk(network, engine.make_pass(batch)), maxlen=1)
    if not isinstance(network, ModelChunk) or network.mtp is None:
        return
    assert network.embedding is not None
    hidden = last.hidden
    for ahead, layer in enumerate(network.mtp.layers, 1):
        # The last tokens of a row get the row's first ones. They don't count, and attention of the others doesn't reach them.
        later = engine.make_pass(replace(batch, tokens=batch.tokens.roll(-ahead, 1)))
        counted.tokens = F.pad(of_pass[ahead:], (0, 0, 0, ahead))
        hidden = layer(network.embedding(later), hidden, later)
