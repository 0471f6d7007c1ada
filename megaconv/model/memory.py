"""Bytes per parameter in training. This is megaconv's only copy of Megatron's table.

                                        optimizer on every rank     distributed over d data-parallel ranks
    fp16 parameters, fp16 gradients     20                          4 + 16 / d
    bf16 parameters, fp32 gradients     18                          6 + 12 / d
    fp32 parameters, fp32 gradients     16                          8 +  8 / d

The numbers cover the weight, the gradient, the fp32 master weight and Adam's two moments. Activations are not included.
Data-parallel ranks may share more: `optim_grads` also shards the gradients, `optim_grads_params` the weights too.
Megatron-FSDP keeps sharded weights beside their fp32 masters. megatron_lite makes them from the masters, and keeps none.

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


class Shares(NamedTuple):
    """Bytes of one parameter on one rank."""

    weight: float
    gradient: float
    state: float


def shares_per_parameter(
    dtype: str,
    data_parallel: float,
    sharding: str,
    *,
    states: int = MOMENTS,
    narrower: int = 0,
    narrower_gradient: int = 0,
    keeps_sharded_weights: bool = True,
) -> Shares:
    """Return the bytes of one parameter on one rank.

    data_parallel: number of ranks that hold the same parameters and share them evenly. sharding: one of SHARDING.
    states: number of state tensors. narrower: bytes by which they are smaller than float32 ones. narrower_gradient: bytes
    by which the gradient is smaller.
    keeps_sharded_weights: whether sharded weights stay beside float32 masters.
    Raises UsageError for a dtype that training doesn't support.
    """
    if dtype not in BYTES_PER_PARAMETER:
        raise UsageError(
            f"{dtype}: nothing is trained in it; choose one of {', '.join(BYTES_PER_PARAMETER)}"
        )
    kept, level = BYTES_PER_PARAMETER[dtype], SHARDING.index(sharding)
    gradient = kept.gradient - narrower_gradient
    state = kept.state - (MOMENTS - states) * FLOAT32 - narrower
    shards_weight = level > SHARDING.index("optim_grads")
    # A float32 weight is its own master.
    has_master = dtype != "float32"
    keeps_weight = keeps_sharded_weights or not (shards_weight and has_master)
    return Shares(
        weight=kept.weight / (data_parallel if shards_weight else 1) if keeps_weight else 0,
        gradient=gradient / (data_parallel if level > SHARDING.index("optim") else 1),
        state=state / (data_parallel if level > SHARDING.index("no_shard") else 1),
    )


def bytes_per_parameter(
    dtype: str, data_parallel: float, *, distributed_optimizer: bool = False, states: int = MOMENTS
) -> float:
    """Return the bytes of one parameter on one rank: the sum of shares_per_parameter."""
    sharding = "optim" if distributed_optimizer else "no_shard"
    return sum(shares_per_parameter(dtype, data_parallel, sharding, states=states))
