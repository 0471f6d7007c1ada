"""The time of a step from the costs of its pipeline ranks: steady passes, bubble, exchange of gradients, update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaconv.model.memory import FLOAT32
from megaconv.model.rank_share import RankShare
from megaconv.planning.gpus import Gpu
from megaconv.planning.layer_costs import Cost, Machine, message_seconds
from megaconv.planning.rates import link
from megaconv.planning.run import Run

UPDATE_BYTES = 30
"""Bytes that an update with Adam reads and writes for a parameter: master and moments twice, gradient and weight once."""
FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a microbatch's time."""
TERMS = ("compute", "memory", "communication", "bubble")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The terms of a step's time on the busiest rank, in seconds."""

    compute: float
    """Products and attention."""
    memory: float
    """Elementwise work and the update of the parameters, which the memory's bandwidth limits."""
    communication: float
    """Exchanges between ranks, and copies to and from main memory, that no computation hides."""
    bubble: float
    """Idle time of the pipeline."""
    copies: float = 0.0
    """The part of communication that waits for copies of offloaded activations."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.memory + self.communication + self.bubble

    def times(self, count: int) -> "StepTime":
        """Return the time of so many such steps."""
        each = {name: count * getattr(self, name) for name in (*TERMS, "copies")}
        return StepTime(**each)

    def terms(self) -> dict[str, float]:
        """Return the terms by name."""
        return {term: float(getattr(self, term)) for term in TERMS}


class Stage(NamedTuple):
    """Pipeline ranks with equal contents."""

    rank: int
    """The first of them, which keeps the most passes."""
    ranks: int
    """The number of these ranks."""
    chunks: tuple[Cost, ...]
    microbatch: Cost
    """The sum over the chunks."""
    share: RankShare
    trained: RankShare
    """The parameters that have gradients."""


def step_time(run: Run, stages: Sequence[Stage], machine: Machine) -> StepTime:
    """Return the time of a step."""
    busiest = max(stages, key=lambda stage: stage.microbatch.seconds)
    busy, trained, number = busiest.microbatch, busiest.trained, run.microbatches
    messages = 2 * message_seconds(run, machine.gpu) if run.layout.pp > 1 else 0.0
    # Megatron and megatron_lite hide messages behind other chunks' passes if there are virtual stages.
    exposed = messages if run.layout.vpp == 1 else 0.0
    # The first and the last microbatch pass through the other ranks before and after the busiest one works.
    passing = sum(stage.ranks * stage.microbatch.seconds for stage in stages)
    others = passing - busy.seconds
    waiting = others / run.layout.vpp + (run.layout.pp - 1) * messages
    gradients = _gradient_seconds(run, trained, busy.seconds, machine.gpu)
    copies = number * busy.waiting
    return StepTime(
        compute=number * (busy.products + busy.attention),
        memory=number * busy.elementwise + _update_seconds(run, trained, machine),
        communication=number * (busy.exchange + exposed) + gradients + copies,
        bubble=waiting,
        copies=copies,
    )


def _update_seconds(run: Run, share: RankShare, machine: Machine) -> float:
    dense, experts = share
    if run.sharding != "no_shard":
        return UPDATE_BYTES * (dense / run.replicas + experts / run.expert_dp) / machine.memory
    return UPDATE_BYTES * (dense + experts) / machine.memory


def _gradient_seconds(run: Run, share: RankShare, microbatch: float, gpu: Gpu) -> float:
    """Return the time of exchanging gradients and parameters that passes don't hide. microbatch: seconds of its passes."""
    layout = run.layout
    turn = _turn_seconds(share.dense, run.replicas, layout.tp, gpu)
    turn += _turn_seconds(share.experts, run.expert_dp, layout.ep * layout.etp, gpu)
    reduce = FLOAT32 * turn
    gather = run.itemsize * turn
    # Without overlap, the exchanges wait for the passes, and hide behind none.
    backward = BACKWARD * microbatch if run.overlaps_reduce else 0.0
    forward = FORWARD * microbatch if run.overlaps_gather else 0.0
    gathered = max(0.0, gather - forward)
    reduced = max(0.0, reduce - backward)
    if run.sharding == "no_shard":
        return max(0.0, 2 * reduce - backward)
    if run.sharding == "optim":
        return reduced + gathered
    if run.sharding == "optim_grads":
        return run.microbatches * reduced + gathered
    gathered_again = gather + reduced
    if run.overlaps_gather:
        gathered_again = max(0.0, gather + reduce - backward)
    return run.microbatches * (gathered + gathered_again)


def _turn_seconds(elements: int, ranks: int, stride: int, gpu: Gpu) -> float:
    """Return the seconds in which a ring passes one byte of each element around."""
    if ranks <= 1 or not elements:
        return 0.0
    return elements * (ranks - 1) / ranks / link(gpu, ranks, stride)
