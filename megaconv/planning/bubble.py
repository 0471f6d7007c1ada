"""Simulates the pipeline schedule to find the idle time of ranks. A backward pass takes twice the time of a forward pass."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megaconv.planning.pipeline_order import Action, order

FORWARD, BACKWARD = 1.0, 2.0
"""Time per layer. Messages take no time in this model."""
SIMULATED = 32
"""Rounds of pp microbatches that are simulated."""


def bubble(pp: int, vpp: int, microbatches: int, layers: Sequence[int]) -> float:
    """Return the fraction of a step in which the busiest rank is idle. layers: of each stage, in the order of the model.

    For equal stages the result is (pp - 1) / (vpp x microbatches + pp - 1).
    """
    # After some rounds of pp microbatches, each further round takes the same time.
    rounds = max(0, microbatches // pp - SIMULATED)
    simulated = microbatches - rounds * pp
    ends = _end(pp, vpp, simulated, layers)
    if rounds:
        ends += rounds * (ends - _end(pp, vpp, simulated - pp, layers))
    busy = max(sum(layers[rank::pp]) for rank in range(pp)) * microbatches * (FORWARD + BACKWARD)
    return 1.0 - busy / ends if ends else 0.0


def _end(pp: int, vpp: int, microbatches: int, layers: Sequence[int]) -> float:
    """Return the time at which all passes have ended."""
    passes = timeline(pp, vpp, microbatches, lambda stage: float(layers[stage]))
    return max(each.end for each in passes)


class Timed(NamedTuple):
    """A pass of a pipeline rank, with the times at which it starts and ends."""

    rank: int
    action: Action
    start: float
    end: float


def timeline(pp: int, vpp: int, microbatches: int, cost: Callable[[int], float]) -> list[Timed]:
    """Return all passes of a step. cost: (stage) -> the time of a forward pass through it."""
    stages = pp * vpp
    left = [order(pp, vpp, microbatches, rank) for rank in range(pp)]
    at = [0] * pp
    free, done = [0.0] * pp, dict[tuple[bool, int, int], float]()
    passes = list[Timed]()
    while any(at[rank] < len(left[rank]) for rank in range(pp)):
        for rank in range(pp):
            while at[rank] < len(left[rank]):
                action = left[rank][at[rank]]
                stage = action.chunk * pp + rank
                ready = _ready(action, stage, stages, done)
                if ready is None:
                    break
                start = max(free[rank], ready)
                end = start + cost(stage) * (BACKWARD if action.backward else FORWARD)
                passes.append(Timed(rank, action, start, end))
                free[rank] = done[action.backward, stage, action.microbatch] = end
                at[rank] += 1
    return passes


def _ready(
    action: Action, stage: int, stages: int, done: dict[tuple[bool, int, int], float]
) -> float | None:
    """Return the time at which the input of a pass is ready, or None if it is not computed yet."""
    if not action.backward:
        return 0.0 if stage == 0 else done.get((False, stage - 1, action.microbatch))
    if stage == stages - 1:
        return done.get((False, stage, action.microbatch))
    return done.get((True, stage + 1, action.microbatch))
