"""Activation recomputation, as a run has it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation: the parts that the backward pass computes again. The names are Megatron's."""

    granularity: str | None = None
    """None; `full`: whole layers; `selective`: only norms and activation functions."""
    method: str = "uniform"
    """For full: `uniform`: groups of `layers` layers, all of them; `block`: the first `layers` of each chunk, one by one."""
    layers: int = 1


KEEP_ALL = Recompute()
"""Nothing is recomputed."""
