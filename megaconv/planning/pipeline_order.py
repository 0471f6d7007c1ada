"""The order of passes on each pipeline rank, as a pure function.

Stage s of the model is chunk s // pp on pipeline rank s % pp.
Sources: 1F1B from PipeDream-Flush (arXiv:2006.09503), interleaving from Megatron-LM (arXiv:2104.04473).
"""

from typing import NamedTuple


class Action(NamedTuple):
    """A forward or backward pass of one microbatch through one chunk of this rank."""

    backward: bool
    chunk: int
    microbatch: int


def forward_order(pp: int, vpp: int, microbatches: int) -> list[Action]:
    """Return only the forward passes: pp microbatches through one chunk, then through the next. The same on every rank."""
    return [
        Action(False, chunk, microbatch)
        for first in range(0, microbatches, pp)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + pp, microbatches))
    ]


def order(pp: int, vpp: int, microbatches: int, pp_rank: int) -> list[Action]:
    """Return the 1F1B order; interleaved if vpp > 1, which requires a multiple of pp microbatches."""
    forward = forward_order(pp, vpp, microbatches)
    backward = [Action(True, vpp - 1 - action.chunk, action.microbatch) for action in forward]
    behind = pp - pp_rank - 1
    # Number of forward passes before the first backward pass.
    warmup = min(len(forward), behind if vpp == 1 else 2 * behind + (vpp - 1) * pp)
    steady = zip(forward[warmup:], backward, strict=False)
    return [
        *forward[:warmup],
        *(action for pair in steady for action in pair),
        *backward[len(forward) - warmup :],
    ]
