"""ALiBi (arXiv 2108.12409): scores fall with the distance between query and key, in each head by another slope."""

import math

from megatron_lite.models.build_plan import Plan


def slopes(heads: int) -> list[float]:
    """Return the decrease of each head's scores with each position of distance.

    The first slopes are a geometric sequence, for the largest power of two that heads reach. Every other slope of the
    sequence for twice as many heads follows. Source: arXiv 2108.12409, and BLOOM in transformers.
    """
    power = 2 ** math.floor(math.log2(heads))
    first = _sequence(power)
    further = _sequence(2 * power)[::2]
    return [*first, *further][:heads]


def _sequence(heads: int) -> list[float]:
    return [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]


def own_slopes(plan: Plan) -> tuple[float, ...]:
    """Return the slopes of this tensor rank's heads. A tensor would be empty in a model that is built without memory."""
    own = plan.sizes["heads"]
    first = plan.ranks.rank * own
    return tuple(slopes(plan.config.attention.heads)[first : first + own])
