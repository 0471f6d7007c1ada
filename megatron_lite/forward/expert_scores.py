"""Measures the part of experts in the output of a mixture. Experts of the smallest part can be left out of a model.

score of an expert    the mean of |weight of the router x output of the expert| over the tokens that choose it
                      (REAP, arXiv:2510.13999)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.errors import CorruptCheckpoint
from megatron_lite.engine import Engine
from megatron_lite.forward.counted_passes import Counted, CountedDispatch
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.moe.counting import count_rows
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
    counted = Counted()
    watched = dict(_watched(engine, counted))
    tokens = counted.run_all(engine, passes)
    layers = {layer: watch.scores(layer) for layer, watch in watched.items()}
    return ExpertScores(layers, tokens)


class _Watch(CountedDispatch):
    """Adds up the outputs of a mixture's experts."""

    def __init__(self, mixture: Mixture, counted: Counted) -> None:
        super().__init__(mixture, counted)
        self._tokens = torch.zeros(mixture.count, dtype=torch.int64)
        self._outputs = torch.zeros(mixture.count, dtype=torch.float64)

    def see_choices(self, chosen: Tensor, count: int) -> None:
        self._tokens += count_rows(chosen.flatten(), count + 1)[:count].cpu()

    def compute(self, compute: Compute, rows: Tensor, scales: Tensor, counts: list[int]) -> Tensor:
        made = compute(rows, scales, counts)
        norms = made.float().norm(dim=-1).double()
        self._outputs += torch.stack([part.sum() for part in norms.split(counts)]).cpu()
        return made

    def scores(self, layer: str) -> LayerScores:
        """Return the sums. layer: its name, for messages. Raises CorruptCheckpoint if they are not finite."""
        if not self._outputs.isfinite().all():
            raise CorruptCheckpoint(
                f"{layer} computes NaN or infinite values, so experts can't be ranked; `megaconv inspect --stats` shows the "
                "tensors that have some"
            )
        return LayerScores(self._tokens.tolist(), self._outputs.tolist())


def _watched(engine: Engine, counted: Counted) -> Iterator[tuple[str, _Watch]]:
    """Watch all mixtures. Yield the canonical name of each mixture's layer."""
    (network,) = engine.chunks
    names = {info.name: next(iter(info.native.parts)) for info in engine.infos[0]}
    for path, module in network.named_modules():
        if isinstance(module, Mixture):
            layer = names[f"{path}.router.weight"].removesuffix(".mlp.router.weight")
            yield layer, _Watch(module, counted)
