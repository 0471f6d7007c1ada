"""Bytes per parameter in training. This is megaconv's only copy of Megatron's table.

                                        optimizer on every rank     distributed over d data-parallel ranks
    fp16 parameters, fp16 gradients     20                          4 + 16 / d
    bf16 parameters, fp32 gradients     18                          6 + 12 / d
    fp32 parameters, fp32 gradients     16                          8 +  8 / d

Gradients that are sharded too (Megatron-FSDP's optim_grads) need their bytes / d. Sharded parameters too
(optim_grads_params): 16 / d with fp32 gradients, because the master weight, or the fp32 weight, is all that a rank keeps.

The numbers cover the weight, the gradient, the fp32 master weight and Adam's two moments. Activations are not included.
An optimizer with one state tensor (momentum) needs 4 bytes less in the shared part. Source:
docs/user-guide/features/dist_optimizer.md of Megatron-LM, core 0.19.
"""

from typing import NamedTuple

from megaconv.errors import UsageError


class Kept(NamedTuple):
    """Bytes of one parameter."""

    weight: int
    gradient: int
    shared: int
    """Bytes that a distributed optimizer shards over the data-parallel ranks."""

    def split(self, sharding: str, *, weight_is_master: bool) -> tuple[int, int]:
        """Return (bytes on every rank, bytes that ranks shard). sharding: Megatron's name of the strategy."""
        if sharding == "optim_grads":
            return self.weight, self.gradient + self.shared
        if sharding == "optim_grads_params":
            return 0, self.gradient + self.shared + (self.weight if weight_is_master else 0)
        return self.weight + self.gradient, self.shared


BYTES_PER_PARAMETER = {
    "float16": Kept(2, 2, 16),
    "bfloat16": Kept(2, 4, 12),
    "float32": Kept(4, 4, 8),
}
"""Dtype of the parameters -> bytes of one parameter, with Adam."""
MOMENTS = 2
"""State tensors of Adam in float32, without the master weight."""
FLOAT32 = 4


def bytes_per_parameter(
    dtype: str,
    data_parallel: float,
    *,
    distributed_optimizer: bool,
    states: int = MOMENTS,
    sharding: str = "optim",
) -> float:
    """Bytes of one parameter on one rank.

    data_parallel: number of ranks that hold the same parameters and share them evenly. states: number of float32 state
    tensors. sharding: with a distributed optimizer, what ranks shard: optim, optim_grads or optim_grads_params.
    Raises UsageError for a dtype that training doesn't support.
    """
    if dtype not in BYTES_PER_PARAMETER:
        raise UsageError(
            f"{dtype}: nothing is trained in it; choose one of {', '.join(BYTES_PER_PARAMETER)}"
        )
    kept = BYTES_PER_PARAMETER[dtype]
    everywhere, shared = kept.split(sharding, weight_is_master=dtype == "float32")
    shared -= (MOMENTS - states) * FLOAT32
    return everywhere + shared / (data_parallel if distributed_optimizer else 1)
