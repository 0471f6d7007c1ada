"""The estimated time of a step, and the memory of the fullest rank, for a described run."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from megaconv.model.config import ModelConfig
from megaconv.model.layout import Chunk, Layout
from megaconv.model.predicting import predicting_kinds
from megaconv.model.rank_share import RankShare
from megaconv.model.subjects import LayerKind
from megaconv.planning.activations import offloaded_bytes
from megaconv.planning.layer_costs import Cost, Machine, head_cost, layer_cost
from megaconv.planning.offload import copy_seconds, waiting_seconds
from megaconv.planning.parameters import Parameters
from megaconv.planning.rank_memory import (
    MemoryParts,
    adapter_memory,
    adapter_parameters,
    rank_memory,
    shares_together,
    state_bytes,
)
from megaconv.planning.run import Run
from megaconv.planning.step_time import Stage, StepTime, step_time

LORA_RANK = 16
"""Rank of the adapters for which memory is counted."""
Contents = tuple[bool, bool, tuple[int, ...]]
"""(is_first, is_last, number of layers of each kind) of a chunk."""


class _Shape(NamedTuple):
    """Pipeline ranks with equal contents."""

    rank: int
    ranks: int
    contents: tuple[Contents, ...]
    chunks: tuple[Chunk, ...]
    """The chunks of the first rank."""


@dataclass(frozen=True)
class Estimate:
    """The cost of one run."""

    run: Run
    time: StepTime
    memory: MemoryParts
    """Memory of the fullest rank."""
    parameters: int
    """Parameters of the fullest rank."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return self.run.global_batch * self.run.seq / self.time.total / self.run.world


class Estimator:
    """Estimates runs of one model. It remembers what candidates of a search have in common."""

    def __init__(self, config: ModelConfig, machine: Machine) -> None:
        self.config, self.machine = config, machine
        self._kinds = list(dict.fromkeys(config.layers))
        self._counts = [_running(config, kind) for kind in self._kinds]
        self._parameters: dict[Hashable, Parameters] = {}
        self._costs: dict[Hashable, dict[Contents, Cost]] = {}
        self._shapes: dict[Hashable, list[_Shape]] = {}
        self._shares: dict[Hashable, RankShare] = {}
        self._stages: dict[Hashable, dict[_Shape, Stage]] = {}
        self._adapters = adapter_parameters(config, LORA_RANK) if machine.frozen else 0

    def parameters(self, run: Run) -> Parameters:
        """Return the parameters of ranks. Raises LayoutError if the model can't be sharded so."""
        layout = run.layout
        key = (layout.tp, layout.ep, layout.etp)
        if key not in self._parameters:
            self._parameters[key] = Parameters.of(self.config, *key, run.vocab_divisor)
        return self._parameters[key]

    def estimate(self, run: Run) -> Estimate:
        """Return the estimate. Raises LayoutError if the model can't be sharded so."""
        stages = self.stages(run)
        largest = self.parameters(run).largest_layer
        sizes = [self._memory(run, stage, largest) for stage in stages]
        memory = max(sizes, key=lambda parts: parts.total)
        fullest = stages[sizes.index(memory)]
        time = step_time(run, stages, self.machine)
        return Estimate(run, time, memory, fullest.share.parameters)

    def stages(self, run: Run) -> list[Stage]:
        """Return the pipeline ranks, those with equal contents together."""
        layout, key = run.layout, _key(run)
        known = self._stages.setdefault(key, {})
        costs = self._costs.setdefault(key, {})
        found = []
        for shape in self._shapes_of(layout):
            if shape not in known:
                known[shape] = self._stage(run, shape, costs)
            found.append(known[shape])
        return found

    def chunk_seconds(self, run: Run) -> list[float]:
        """Return the seconds of a microbatch, forward and backward, in each stage in the order of the model."""
        self.stages(run)
        costs = self._costs[_key(run)]
        return [costs[self._contents(chunk)].seconds for chunk in run.layout.chunks()]

    def _shapes_of(self, layout: Layout) -> list[_Shape]:
        key = layout.pp, layout.vpp, layout.stage_layers
        if key not in self._shapes:
            chunks: dict[int, list[Chunk]] = {}
            for chunk in layout.chunks():
                chunks.setdefault(chunk.pp_rank, []).append(chunk)
            grouped: dict[tuple[Contents, ...], list[int]] = {}
            for rank, own in chunks.items():
                grouped.setdefault(tuple(map(self._contents, own)), []).append(rank)
            self._shapes[key] = [
                _Shape(ranks[0], len(ranks), contents, tuple(chunks[ranks[0]]))
                for contents, ranks in grouped.items()
            ]
        return self._shapes[key]

    def _stage(self, run: Run, shape: _Shape, costs: dict[Contents, Cost]) -> Stage:
        parameters = self.parameters(run)
        for contents in shape.contents:
            if contents not in costs:
                costs[contents] = self._cost_of(run, contents, costs, parameters)
        chunks = tuple(costs[contents] for contents in shape.contents)
        together = Cost(*(sum(values) for values in zip(*chunks, strict=True)))
        share = self._share(run, shape)
        trained = self._adapters_of(run, shape) if self.machine.frozen else share
        return Stage(shape.rank, shape.ranks, chunks, together, share, trained)

    def _adapters_of(self, run: Run, shape: _Shape) -> RankShare:
        """Return the parameters of a rank's adapters, and of modules that are trained whole beside them."""
        found = []
        for is_first, is_last, counts in shape.contents:
            found.append(RankShare(_whole_elements(run, is_first=is_first, is_last=is_last), 0))
            for kind, count in zip(self._kinds, counts, strict=True):
                each = run.adapters_of(kind)
                found.append(RankShare(count * each.dense, count * each.experts))
        return shares_together(found)

    def _share(self, run: Run, shape: _Shape) -> RankShare:
        layout = run.layout
        key = layout.tp, layout.ep, layout.etp, shape
        if key not in self._shares:
            parameters = self.parameters(run)
            chunks = [parameters.chunk(chunk) for chunk in shape.chunks]
            self._shares[key] = shares_together(chunks)
        return self._shares[key]

    def state_fits(self, run: Run, memory: int) -> bool:
        """Return whether weights, gradients and optimizer state fit. It takes less time than the whole estimate."""
        if self.machine.frozen:
            return True
        shares = (self._share(run, shape) for shape in self._shapes_of(run.layout))
        return all(sum(state_bytes(run, share)) <= memory for share in shares)

    def _memory(self, run: Run, stage: Stage, largest: int) -> MemoryParts:
        if self.machine.frozen:
            return adapter_memory(run, stage, self._adapters // run.layout.pp)
        return rank_memory(run, stage, largest)

    def _contents(self, chunk: Chunk) -> Contents:
        first, end = chunk.first_layer, chunk.first_layer + chunk.layers
        return (
            chunk.is_first,
            chunk.is_last,
            tuple(counts[end] - counts[first] for counts in self._counts),
        )

    def _cost_of(
        self, run: Run, contents: Contents, known: dict[Contents, Cost], parameters: Parameters
    ) -> Cost:
        """Return the cost of a chunk's layers and, in the last one, of the head."""
        found = Cost()
        for kind, count in zip(self._kinds, contents[2], strict=True):
            if count:
                each = self._layer_cost(run, kind, known, parameters)
                found = _sum(found, each, count)
        head = Cost()
        if contents[1]:
            inside = [
                (kind, parameters.layer(self._last_like(kind)))
                for kind in predicting_kinds(self.config)
            ]
            head = head_cost(run, inside, self.machine)
        if run.offloaded:
            found = self._offloaded(run, found, head.seconds, known)
        return _sum(found, head, 1)

    def _last_like(self, kind: LayerKind) -> int:
        """Return the last layer with this kind's mixer and MLP; if there is none, the last layer."""
        layers = self.config.layers
        alike = (
            layer
            for layer in reversed(range(len(layers)))
            if (layers[layer].mixer, layers[layer].mlp) == (kind.mixer, kind.mlp)
        )
        return next(alike, len(layers) - 1)

    def _offloaded(
        self, run: Run, layers: Cost, head: float, known: Mapping[Contents, Cost]
    ) -> Cost:
        """Return the cost of all layers if the activations of the first ones are offloaded. head: seconds of the head."""
        seconds = [known[self._alone(kind)].seconds for kind in self.config.layers]
        waiting = waiting_seconds(seconds, head, copy_seconds(run, self.machine.gpu))
        return layers._replace(waiting=waiting, kept=layers.kept - offloaded_bytes(run))

    def _alone(self, kind: LayerKind) -> Contents:
        """Return the contents of a chunk with one layer of this kind."""
        return False, False, tuple(int(kind == other) for other in self._kinds)

    def _layer_cost(
        self,
        run: Run,
        kind: LayerKind,
        known: dict[Contents, Cost],
        parameters: Parameters,
    ) -> Cost:
        alone = self._alone(kind)
        if alone not in known:
            share = parameters.layer(self.config.layers.index(kind))
            known[alone] = layer_cost(run, kind, share, self.machine)
        return known[alone]


def _whole_elements(run: Run, *, is_first: bool, is_last: bool) -> int:
    """Return the elements of embedding and head on a rank, as far as they are trained whole beside adapters."""
    trains_first, trains_last = is_first and run.trains_embedding, is_last and run.trains_head
    is_one = is_first and is_last and run.config.tie_embeddings
    modules = 1 if is_one and trains_first else trains_first + trains_last
    return round(modules * run.logit_columns * run.config.hidden)


def _key(run: Run) -> Hashable:
    """Return the sizes on which the costs of stages depend, except for their layers."""
    layout = run.layout
    return (
        layout.tp, layout.ep, layout.etp, run.cp, run.micro_batch, run.seq, run.sequence, run.context,
        run.dispatcher, run.overlaps_experts, run.dtype, run.recompute.granularity, run.offloaded,
        run.frozen, run.trains_embedding, run.trains_head, run.trains_rows, run.adapters,
        run.rests_mtp, run.rests_head, run.head_again,
    )  # fmt: skip


def _running(config: ModelConfig, kind: LayerKind) -> list[int]:
    """Return how many of the first layers are of a kind, for 0 to all layers."""
    return [0, *accumulate(int(other == kind) for other in config.layers)]


def _sum(one: Cost, other: Cost, count: int) -> Cost:
    """Return the cost of one and `count` of the other. Only one layer at a time is recomputed."""
    added = Cost(*(a + count * b for a, b in zip(one, other, strict=True)))
    return added._replace(inside=max(one.inside, other.inside))
