"""The settings of parallelism and of the balance between experts. settings/config.py says how flags follow from a class."""

from dataclasses import dataclass

from megaconv.model.memory import SHARDING
from megatron_lite.settings.flag import flag


@dataclass(frozen=True)
class Parallel:
    """Parallelism"""

    tensor_model_parallel_size: int = flag(
        1, "ranks that shard each layer's matrices", short="--tp"
    )
    pipeline_model_parallel_size: int = flag(
        1, "pipeline stages: ranks that shard the layers", short="--pp"
    )
    pipeline_model_parallel_split_rank: int | None = flag(
        None, "T5: the first N pipeline stages belong to the encoder"
    )
    encoder_pipeline_model_parallel_size: int | None = flag(
        None, "T5: additional encoder stages before those of --pipeline-model-parallel-size"
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "interleave: layers of one virtual stage"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "interleave: virtual stages of each rank"
    )
    context_parallel_size: int = flag(1, "ranks that shard each sequence", short="--cp")
    cp_comm_type: tuple[str, ...] = flag(
        ("p2p",),
        "communication of context-parallel attention: p2p (keys and values in a ring), all_gather, a2a (tokens for heads), a2a+p2p",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        None, "a2a+p2p only: NEAR FAR, the ranks of an all-to-all and the ranks of a ring"
    )
    expert_model_parallel_size: int = flag(
        1, "ranks that shard the experts of a layer", short="--ep"
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "ranks that shard each expert's matrices (default: --tp if the sizes fit, else 1)",
        short="--etp",
    )
    moe_token_dispatcher_type: str = flag(
        "alltoall",
        "send tokens to their experts (alltoall), or gather all tokens on each rank (allgather)",
        choices=("alltoall", "allgather"),
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first stage, if stages are uneven"
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last stage, if stages are uneven"
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "count the embedding as a layer when dividing layers over stages"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "count the head as a layer when dividing layers over stages"
    )
    pipeline_model_parallel_layout: str | None = flag(
        None, "pattern of all stages, such as Et*3|(tt|)*2,tL"
    )
    sequence_parallel: bool = flag(
        False, "shard activations between the matrices along the sequence, over the tp ranks"
    )
    use_distributed_optimizer: bool = flag(
        False, "shard optimizer state over the data-parallel ranks"
    )
    data_parallel_sharding_strategy: str | None = flag(
        None,
        "what data-parallel ranks shard: nothing; optimizer state (as --use-distributed-optimizer); gradients too; parameters too",
        choices=SHARDING,
    )
    overlap_grad_reduce: bool = flag(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = flag(False, "gather parameters during the forward pass")
    grad_reduce_in_bf16: bool = flag(
        False,
        "reduce gradients in bf16 between data-parallel ranks; each rank adds its own microbatches in fp32",
    )
    ddp_bucket_size: int | None = flag(None, "elements of a gradient bucket (default: 40 million)")
    distributed_backend: str | None = flag(
        None,
        "communication backend (default: nccl if every process has a GPU, else gloo)",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: float = flag(
        10.0, "watchdog: end the run if a rank is silent for this long"
    )

    def shards(self, strategy: str) -> bool:
        """Return whether the run shards what this strategy shards."""
        chosen = self.data_parallel_sharding_strategy or "no_shard"
        return SHARDING.index(chosen) >= SHARDING.index(strategy)


@dataclass(frozen=True)
class Balance:
    """Load balancing of experts (the logged loss excludes balancing losses)"""

    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",),
        "losses that balance the load of experts: aux_loss, seq_aux_loss, global_aux_loss, none",
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,), "one coefficient for each balancing loss")
    moe_z_loss_coeff: float = flag(
        0.0, "coefficient of a loss that keeps the router's logits small"
    )
    moe_router_bias_update_rate: float = flag(
        1e-3, "change of each expert bias in a step; 0: no change"
    )
    moe_expert_capacity_factor: float | None = flag(
        None,
        "capacity of an expert, as a multiple of an even share of tokens; each tensor rank drops its excess tokens (default: no limit)",
    )
    moe_token_drop_policy: str = flag(
        "probs",
        "tokens that an expert keeps: those with the largest weights (probs), or any (position)",
        choices=("probs", "position"),
    )
    moe_pad_expert_input_to_capacity: bool = flag(
        False,
        "pad the rows of each expert to its capacity with zeros; then the host never waits for the numbers of rows",
    )
    moe_router_dtype: str | None = flag(
        None, "precision of routers (default: the model's)", choices=("fp32", "fp64")
    )
