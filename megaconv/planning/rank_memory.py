"""The memory of one pipeline rank by what it is for, in bytes."""

from dataclasses import dataclass, fields
from operator import mul

from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.memory import BYTES_PER_PARAMETER, Shares, shares_per_parameter
from megaconv.model.rank_share import RankShare
from megaconv.model.table import canonical_shapes
from megaconv.planning.activations import on_their_way
from megaconv.planning.gpus import GIB
from megaconv.planning.in_flight import peaks
from megaconv.planning.layer_costs import LOGIT_BYTES
from megaconv.planning.mlps import routed_width
from megaconv.planning.run import Run
from megaconv.planning.step_time import Stage

CONTEXT = 1 * GIB
"""Memory that CUDA, NCCL and the libraries of products take from each GPU."""
GATHERED = 2
"""Layers whose gathered parameters exist at one time if parameters are sharded: the one in use and the next one."""


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Memory of a rank, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    """Gathered tensors, experts' rows on their way, and the memory of CUDA and NCCL."""

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.buffers

    def parts(self) -> dict[str, float]:
        """Return the parts by name."""
        return {part.name: float(getattr(self, part.name)) for part in fields(self)}


def state_bytes(run: Run, share: RankShare) -> Shares:
    """Return the bytes of a rank's parameters, as Megatron-LM keeps them.

    share: its parameters, sharded or not over data-parallel ranks.
    """
    dense = shares_per_parameter(run.dtype, run.replicas, run.sharding)
    experts = shares_per_parameter(run.dtype, run.expert_dp, run.sharding)
    return Shares(
        weight=share.dense * dense.weight + share.experts * experts.weight,
        gradient=share.dense * dense.gradient + share.experts * experts.gradient,
        state=share.dense * dense.state + share.experts * experts.state,
    )


def rank_memory(run: Run, stage: Stage, largest_layer: int) -> MemoryParts:
    """Return the memory of a rank in training. largest_layer: parameters of the largest layer on the rank."""
    state, kept = state_bytes(run, stage.share), BYTES_PER_PARAMETER[run.dtype]
    buffers = _buffers(run)
    if run.sharding == "optim_grads_params":
        buffers += GATHERED * largest_layer * (kept.weight + kept.gradient)
    return MemoryParts(
        weights=state.weight,
        gradients=state.gradient,
        optimizer=state.state,
        activations=_activations(run, stage),
        logits=_logits(run, stage),
        buffers=buffers,
    )


def adapter_memory(run: Run, stage: Stage, adapters: int) -> MemoryParts:
    """Return the memory of a rank that trains only adapters. adapters: their parameters on the rank."""
    kept = BYTES_PER_PARAMETER[run.dtype]
    return MemoryParts(
        weights=kept.weight * (stage.share.parameters + adapters),
        gradients=kept.gradient * adapters,
        optimizer=kept.state * adapters,
        activations=_activations(run, stage),
        logits=_logits(run, stage),
        buffers=_buffers(run),
    )


def adapter_parameters(config: ModelConfig, rank: int) -> int:
    """Return the parameters of adapters of this rank for all matrices of layers, except those of experts."""
    shapes = canonical_shapes(family(config.family).rows, config)
    return sum(
        rank * sum(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and name.startswith("layers.") and ".experts." not in name
    )


def _activations(run: Run, stage: Stage) -> float:
    """Return the most that the passes in progress keep, and the layers that are recomputed or copied."""
    kept = [chunk.kept for chunk in stage.chunks]
    layout = run.layout
    moments = peaks(layout.pp, layout.vpp, run.microbatches, stage.rank)
    most: float = max(sum(map(mul, counts, kept)) for counts in moments)
    copied = on_their_way(run) if run.offloaded else 0
    return most + max(chunk.inside for chunk in stage.chunks) + copied


def _logits(run: Run, stage: Stage) -> float:
    """Return the bytes of a microbatch's logits and of their gradients, as Megatron-LM keeps them all at one time."""
    if stage.rank != run.layout.pp - 1:
        return 0.0
    return run.tokens * run.logit_columns * (LOGIT_BYTES + run.itemsize)


def _buffers(run: Run) -> float:
    """Return the bytes of communication buffers."""
    hidden = run.tokens * run.config.hidden * run.itemsize
    found = float(CONTEXT)
    if run.layout.tp > 1:
        found += 2 * hidden
    if run.layout.ep > 1:
        row = routed_width(run.config) * run.itemsize
        found += 2 * row * run.routed_rows * run.layout.etp
    return found


def shares_together(shares: list[RankShare]) -> RankShare:
    """Return the sum."""
    return RankShare(sum(one.dense for one in shares), sum(one.experts for one in shares))
