"""Bytes that a parameter takes while it is trained: Megatron's table, the one place where it stands.

                                        optimizer on every rank     distributed over d data-parallel ranks
    fp16 parameters, fp16 gradients     20                          4 + 16 / d
    bf16 parameters, fp32 gradients     18                          6 + 12 / d
    fp32 parameters, fp32 gradients     16                          8 +  8 / d

Weight, gradient, fp32 master and two moments of Adam; activations come on top. An optimizer with one tensor of state (momentum)
has 4 bytes less of what is shared. Source: docs/user-guide/features/dist_optimizer.md of Megatron-LM, core 0.19.
"""

from typing import NamedTuple

from megaconv.errors import UsageError


class Kept(NamedTuple):
    """Bytes of one parameter."""

    on_every_rank: int
    """Weight and gradient, and what a distributed optimizer doesn't share out."""
    shared: int
    """What data-parallel ranks with a distributed optimizer have a share of."""


BYTES_PER_PARAMETER = {"float16": Kept(4, 16), "bfloat16": Kept(6, 12), "float32": Kept(8, 8)}
"""By the dtype of the parameters; with Adam."""
MOMENTS = 2
"""Of Adam: tensors that it keeps beside the master, in float32."""
FLOAT32 = 4


def bytes_per_parameter(
    dtype: str, data_parallel: float, *, distributed_optimizer: bool, states: int = MOMENTS
) -> float:
    """data_parallel: ranks that hold the same parameters, and share them evenly. states: float32 tensors of optimizer state.

    Raises UsageError for a dtype that nothing is trained in.
    """
    if dtype not in BYTES_PER_PARAMETER:
        raise UsageError(f"{dtype}: nothing is trained in it; choose one of {', '.join(BYTES_PER_PARAMETER)}")
    kept = BYTES_PER_PARAMETER[dtype]
    shared = kept.shared - (MOMENTS - states) * FLOAT32
    return kept.on_every_rank + shared / (data_parallel if distributed_optimizer else 1)
