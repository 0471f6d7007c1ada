"""Simulates the pipeline schedule to find the idle time of ranks. A backward pass takes twice the time of a forward pass."""

from collections.abc import Callable, Sequence

from megaconv.planning.pipeline_order import Action, order

FORWARD, BACKWARD = 1.0, 2.0
"""Time per layer. Messages take no time in this model."""


def bubble(pp: int, vpp: int, microbatches: int, layers: Sequence[int]) -> float:
    """Return the fraction of a step in which the busiest rank is idle. layers: of each stage, in the order of the model.

    For equal stages the result is (pp - 1) / (vpp x microbatches + pp - 1).
    """
    ends = _walk(pp, vpp, microbatches, lambda stage: float(layers[stage]))
    busy = max(sum(layers[rank::pp]) for rank in range(pp)) * microbatches * (FORWARD + BACKWARD)
    return 1.0 - busy / ends if ends else 0.0


def _walk(pp: int, vpp: int, microbatches: int, cost: Callable[[int], float]) -> float:
    """Return the time at which the last pass ends."""
    stages = pp * vpp
    left = [order(pp, vpp, microbatches, rank) for rank in range(pp)]
    at = [0] * pp
    free, done = [0.0] * pp, dict[tuple[bool, int, int], float]()
    while any(at[rank] < len(left[rank]) for rank in range(pp)):
        for rank in range(pp):
            while at[rank] < len(left[rank]):
                action = left[rank][at[rank]]
                stage = action.chunk * pp + rank
                ready = _ready(action, stage, stages, done)
                if ready is None:
                    break
                free[rank] = max(free[rank], ready) + cost(stage) * (
                    BACKWARD if action.backward else FORWARD
                )
                done[action.backward, stage, action.microbatch] = free[rank]
                at[rank] += 1
    return max(free)


def _ready(
    action: Action, stage: int, stages: int, done: dict[tuple[bool, int, int], float]
) -> float | None:
    """Return the time at which the input of a pass is ready, or None if it is not computed yet."""
    if not action.backward:
        return 0.0 if stage == 0 else done.get((False, stage - 1, action.microbatch))
    if stage == stages - 1:
        return done.get((False, stage, action.microbatch))
    return done.get((True, stage + 1, action.microbatch))
