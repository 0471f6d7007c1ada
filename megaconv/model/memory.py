"""Bytes per parameter in training. This is megaconv's only copy of Megatron's table.

                                        optimizer on every rank     distributed over d data-parallel ranks
    fp16 parameters, fp16 gradients     20                          4 + 16 / d
    bf16 parameters, fp32 gradients     18                          6 + 12 / d
    fp32 parameters, fp32 gradients     16                          8 +  8 / d

The numbers cover the weight, the gradient, the fp32 master weight and Adam's two moments. Activations are not included.
Data-parallel ranks may share more: `optim_grads` also shards the gradients, `optim_grads_params` the weights too.

An optimizer with one state tensor (momentum) needs 4 bytes less in the shared part. Source:
docs/user-guide/features/dist_optimizer.md of Megatron-LM, core 0.19.
"""

from typing import NamedTuple

from megaconv.errors import UsageError


class Kept(NamedTuple):
    """Bytes of one parameter."""

    weight: int
    gradient: int
    state: int
    """The fp32 master weight, if there is one, and Adam's moments."""


BYTES_PER_PARAMETER = {
    "float16": Kept(2, 2, 16),
    "bfloat16": Kept(2, 4, 12),
    "float32": Kept(4, 4, 8),
}
"""Dtype of the parameters -> bytes of one parameter, with Adam."""
MOMENTS = 2
"""State tensors of Adam in float32, without the master weight."""
FLOAT32 = 4


SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Megatron's names for the state that data-parallel ranks shard, from nothing to everything (ZeRO 0 to 3)."""


def bytes_per_parameter(
    dtype: str,
    data_parallel: float,
    *,
    distributed_optimizer: bool = False,
    sharding: str | None = None,
    states: int = MOMENTS,
) -> float:
    """Bytes of one parameter on one rank.

    data_parallel: number of ranks that hold the same parameters and share them evenly. states: number of float32 state
    tensors. sharding: one of SHARDING; None: `optim` with a distributed optimizer, else `no_shard`.
    Raises UsageError for a dtype that training doesn't support.
    """
    if dtype not in BYTES_PER_PARAMETER:
        raise UsageError(
            f"{dtype}: nothing is trained in it; choose one of {', '.join(BYTES_PER_PARAMETER)}"
        )
    kept = BYTES_PER_PARAMETER[dtype]
    state = kept.state - (MOMENTS - states) * FLOAT32
    # In the order in which the levels of sharding begin to share them.
    in_order = (state, kept.gradient, kept.weight)
    level = SHARDING.index(sharding or ("optim" if distributed_optimizer else "no_shard"))
    return sum(in_order[level:]) + sum(in_order[:level]) / data_parallel
