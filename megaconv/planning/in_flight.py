"""The passes of which a pipeline rank keeps activations at one time, by chunk."""

from functools import cache

from megaconv.planning.pipeline_order import order


@cache
def peaks(pp: int, vpp: int, microbatches: int, pp_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the counts by chunk at the moments when a rank may keep most. No count vector is below another one."""
    counts, seen = [0] * vpp, set[tuple[int, ...]]()
    for action in order(pp, vpp, _enough(pp, microbatches), pp_rank):
        if action.backward:
            seen.add(tuple(counts))
            counts[action.chunk] -= 1
        else:
            counts[action.chunk] += 1
    return tuple(one for one in seen if not any(_below(one, other) for other in seen))


def _enough(pp: int, microbatches: int) -> int:
    """Return a number of microbatches after which the order repeats itself."""
    return min(microbatches, 4 * pp)


def _below(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
