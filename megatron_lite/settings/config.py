"""Every setting of a run, one frozen dataclass a subject: flags, YAML keys and help are made from these and nothing else.

A field's name is Megatron-LM's flag with underscores (`--micro-batch-size` is `micro_batch_size`), and so is its meaning.
A class's docstring is the heading under which `--help` lists its flags.
"""

from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any

from megatron_lite.settings.flag import flag
from megatron_lite.settings.learning import Data, Dpo, Lora, Masked, Tasks
from megatron_lite.settings.model import Model


@dataclass(frozen=True)
class Parallel:
    """Parallelism"""

    tensor_model_parallel_size: int = flag(1, "ranks that share each layer's matrices", short="--tp")
    pipeline_model_parallel_size: int = flag(1, "ranks that share the layers", short="--pp")
    pipeline_model_parallel_split_rank: int | None = flag(
        None, "of a T5: how many of these stages, the first ones, are the encoder's"
    )
    encoder_pipeline_model_parallel_size: int | None = flag(
        None, "of a T5: stages of the encoder, before those of --pipeline-model-parallel-size"
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, "interleave: layers of one virtual stage")
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "interleave: virtual stages of each rank")
    context_parallel_size: int = flag(1, "ranks that share each sequence", short="--cp")
    cp_comm_type: tuple[str, ...] = flag(
        ("p2p",),
        "how they attend to each other's tokens: p2p (keys and values in a ring), all_gather, a2a (heads for tokens), a2a+p2p",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        None, "of a2a+p2p, NEAR FAR: so many neighbours take heads for tokens, and so many of these attend in a ring"
    )
    expert_model_parallel_size: int = flag(1, "ranks that share the experts of a layer", short="--ep")
    expert_tensor_parallel_size: int | None = flag(
        None, "ranks that share each expert's matrices (as --tp where that fits, else 1)", short="--etp"
    )
    moe_token_dispatcher_type: str = flag(
        "alltoall",
        "how tokens get to experts of other ranks: exchanged, or gathered by all of these ranks",
        choices=("alltoall", "allgather"),
    )
    decoder_first_pipeline_num_layers: int | None = flag(None, "layers of the first stage, where uneven")
    decoder_last_pipeline_num_layers: int | None = flag(None, "layers of the last stage, where uneven")
    account_for_embedding_in_pipeline_split: bool = flag(False, "count the embedding as a layer when sharing out")
    account_for_loss_in_pipeline_split: bool = flag(False, "count the head as a layer when sharing out")
    pipeline_model_parallel_layout: str | None = flag(None, "all stages, as in Et*3|(tt|)*2,tL")
    sequence_parallel: bool = flag(
        False, "shard activations between the matrices along the sequence, over the tp ranks"
    )
    use_distributed_optimizer: bool = flag(False, "share optimizer state over the data-parallel ranks")
    overlap_grad_reduce: bool = flag(False, "reduce gradients while the backward pass goes on")
    overlap_param_gather: bool = flag(False, "gather parameters while the forward pass goes on")
    grad_reduce_in_bf16: bool = flag(
        False, "send gradients in bf16 between data-parallel ranks; each adds its own up in fp32"
    )
    ddp_bucket_size: int | None = flag(None, "elements of a gradient bucket (40 million)")
    distributed_backend: str | None = flag(
        None, "communication (nccl with a GPU for every process, else gloo)", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(10.0, "watchdog: give up on a silent rank after this long")


@dataclass(frozen=True)
class Balance:
    """Balance of experts, whose losses are no part of the loss that is logged"""

    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",), "losses that keep experts equally busy: aux_loss, seq_aux_loss, global_aux_loss, none"
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,), "a coefficient for each of them")
    moe_z_loss_coeff: float = flag(0.0, "coefficient of a loss that keeps the router's logits small")
    moe_router_bias_update_rate: float = flag(
        1e-3, "how far a step moves a router's bias of each expert, where it has one; 0: not at all"
    )
    moe_expert_capacity_factor: float | None = flag(
        None,
        "of an even share of tokens, how many an expert takes; the others are dropped, by each tensor rank among its own (all)",
    )
    moe_token_drop_policy: str = flag(
        "probs", "which it takes: those of the largest weights, or any", choices=("probs", "position")
    )
    moe_router_dtype: str | None = flag(None, "in which routers compute (the model's)", choices=("fp32", "fp64"))


@dataclass(frozen=True)
class Training:
    """Training"""

    micro_batch_size: int = flag(1, "sequences of one forward pass")
    global_batch_size: int | None = flag(None, "sequences of one step (micro batch x data-parallel size)")
    mtp_loss_scaling_factor: float = flag(0.1, "what the losses of further tokens together count for")
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "START INCREMENT SAMPLES: grow the global batch from START by INCREMENTs over SAMPLES"
    )
    seq_length: int | None = flag(None, "tokens of a sequence (the model's positions, at most 4096)")
    encoder_seq_length: int | None = flag(None, "of a T5: another name for --seq-length, what its encoder reads")
    decoder_seq_length: int = flag(
        128, "of a T5: tokens that its decoder says, one for each hidden token and each run of them"
    )
    train_iters: int | None = flag(None, "steps in all")
    train_samples: int | None = flag(None, "sequences in all, instead of --train-iters")
    epochs: int | None = flag(
        None, "times through --finetune-data or --train-data, instead of --train-iters; 0: measure a --task alone"
    )
    eval_interval: int = flag(1000, "steps between evaluations")
    eval_iters: int = flag(100, "batches of an evaluation; 0: none")
    exit_interval: int | None = flag(None, "save and exit (status 0) at a step that this divides")
    exit_duration_in_mins: float | None = flag(None, "save and exit (status 0) after this long")
    seed: int = flag(1234, "of initial weights, order of data, dropout")
    deterministic_mode: bool = flag(
        False, "the same bits twice on a GPU too, by slower kernels; a CPU always gives them"
    )
    manual_gc: bool = flag(False, "collect Python's garbage at set times, on all ranks at the same step")
    manual_gc_interval: int = flag(0, "steps between these; 0: at the start alone")
    no_manual_gc_eval: bool = flag(False, "not before and after evaluations")
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, "steps between checks that data-parallel ranks hold the same weights (none)"
    )
    no_check_for_nan_in_loss_and_grad: bool = flag(False, "go on when the loss is NaN")


@dataclass(frozen=True)
class Optimizer:
    """Optimizer and learning rate"""

    optimizer: str = flag(
        "adam", "adam (AdamW), SGD with momentum, or muon for the matrices of layers and adam for the rest; dist_muon: muon with "
        "--use-distributed-optimizer",
        choices=("adam", "sgd", "muon", "dist_muon"),
    )  # fmt: skip
    sgd_momentum: float = flag(0.9, "momentum of sgd")
    muon_momentum: float = flag(0.95, "momentum of muon")
    muon_use_nesterov: bool = flag(False, "look one step of momentum ahead")
    muon_num_ns_steps: int = flag(5, "steps of Newton and Schulz's iteration")
    muon_coefficient_type: str = flag("quintic", "its coefficients", choices=("quintic", "simple"))
    muon_scale_mode: str = flag(
        "spectral", "what an update is multiplied with, by its shape: sqrt(max(out, in)), sqrt(out / in), the latter but at least 1",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )  # fmt: skip
    muon_extra_scale_factor: float = flag(1.0, "and for any shape (0.2: as large as Adam's)")
    muon_fp32_matmul_prec: str = flag(
        "medium", "precision of the iteration: bf16 or fp32", choices=("medium", "highest")
    )
    muon_tp_mode: str = flag(
        "blockwise",
        "each tensor rank's part a matrix of its own, or all of them gathered",
        choices=("blockwise", "duplicated"),
    )
    qk_clip: bool = flag(
        False,
        "after each step shrink what makes queries and keys of heads whose scores grew too large, with any optimizer",
    )
    qk_clip_threshold: float = flag(100.0, "the largest score of attention that is left alone")
    qk_clip_alpha: float = flag(0.5, "the queries' share in it, as an exponent; the keys' is the rest")
    lr: float | None = flag(None, "highest learning rate")
    min_lr: float = flag(0.0, "lowest learning rate")
    decoupled_lr: float | None = flag(None, "highest learning rate of the embedding and the head (--lr)")
    decoupled_min_lr: float | None = flag(None, "their lowest, with --decoupled-lr (--min-lr)")
    lr_decay_style: str = flag(
        "linear", "how it decays", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = flag(None, "steps of the decay, warm-up included (--train-iters)")
    lr_decay_samples: int | None = flag(None, "the same in samples (--train-samples)")
    lr_wsd_decay_style: str = flag(
        "exponential", "the last phase of WSD", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "steps of that phase")
    lr_wsd_decay_samples: int | None = flag(None, "samples of that phase")
    lr_warmup_iters: int = flag(0, "steps of linear warm-up")
    lr_warmup_samples: int = flag(0, "samples of linear warm-up")
    lr_warmup_fraction: float | None = flag(None, "warm-up as a part of the decay")
    lr_warmup_init: float = flag(0.0, "learning rate at which the warm-up starts")
    weight_decay: float = flag(0.01, "weight decay of matrices")
    start_weight_decay: float | None = flag(None, "weight decay at the start, with --weight-decay-incr-style")
    end_weight_decay: float | None = flag(None, "weight decay at the end")
    weight_decay_incr_style: str = flag("constant", "how it grows", choices=("constant", "linear", "cosine"))
    clip_grad: float = flag(1.0, "clip the gradient's norm to this; 0: don't")
    adam_beta1: float = flag(0.9, "Adam's first beta")
    adam_beta2: float = flag(0.999, "Adam's second beta")
    adam_eps: float = flag(1e-8, "Adam's epsilon")

    @property
    def kind(self) -> str:
        """`adamw`, `sgd` or `muon`."""
        return {"adam": "adamw", "dist_muon": "muon"}.get(self.optimizer, self.optimizer)


@dataclass(frozen=True)
class Precision:
    """Precision; fp32 unless one is given, and that of its checkpoint for finetune"""

    fp32: bool = flag(False, "compute in fp32")
    bf16: bool = flag(False, "compute in bf16, with fp32 main weights and gradients")
    fp16: bool = flag(False, "compute in fp16, the same, with a scaled loss")
    loss_scale: float | None = flag(None, "constant loss scale (dynamic)")
    initial_loss_scale: float = flag(2.0**32, "where the dynamic loss scale starts")
    min_loss_scale: float = flag(1.0, "the least dynamic loss scale")
    loss_scale_window: int = flag(1000, "steps without overflow after which it doubles")
    hysteresis: int = flag(2, "overflows after which it halves")
    fp8_format: str | None = flag(
        None, "multiply layers' matrices in FP8: e4m3, or with gradients in e5m2", choices=("e4m3", "hybrid")
    )
    fp8_recipe: str = flag(
        "delayed", "what shares a scale: a tensor, now (tensorwise) or by earlier steps, or blocks of one",
        choices=("tensorwise", "delayed", "blockwise", "mxfp8"),
    )  # fmt: skip
    fp8_margin: int = flag(0, "powers of two that scales stay below the largest")
    fp8_amax_history_len: int = flag(1, "steps that delayed scales look back")
    fp8_amax_compute_algo: str = flag(
        "most_recent", "which of their largest elements counts", choices=("most_recent", "max")
    )
    no_fp8_wgrad: bool = flag(False, "gradients of weights in bf16")
    first_last_layers_bf16: bool = flag(False, "some layers at both ends in bf16")
    num_layers_at_start_in_bf16: int = flag(1, "how many at the start")
    num_layers_at_end_in_bf16: int = flag(1, "how many at the end")


@dataclass(frozen=True)
class Recompute:
    """Memory against time"""

    recompute_granularity: str | None = flag(
        None, "what the backward pass computes again: whole layers or what is cheap", choices=("full", "selective")
    )
    recompute_method: str | None = flag(
        None, "for full: groups of layers from each stage's start (uniform) or its first layers (block)",
        choices=("uniform", "block"),
    )  # fmt: skip
    recompute_num_layers: int | None = flag(None, "layers of a group, or layers recomputed")
    compile: bool = flag(False, "torch.compile each layer")


@dataclass(frozen=True)
class Checkpointing:
    """Checkpoints"""

    load: str | None = flag(
        None, "checkpoint to start from: any that megaconv reads, or a Hub id; with the same --save as --resume"
    )
    save: str | None = flag(None, "directory to save to")
    save_interval: int | None = flag(None, "steps between saves (at the end only)")
    resume: bool = flag(False, "continue from --save where it holds a checkpoint, else start as the other flags say")
    keep_last: int | None = flag(None, "keep this many checkpoints, remove older ones")
    ckpt_format: str = flag("torch_dist", "format to save in", choices=("torch_dist", "torch"))
    transformer_impl: str = flag(
        "transformer_engine",
        "whose modules (their _extra_state) a checkpoint lists; and, where it is installed, whether it computes in FP8",
        choices=("transformer_engine", "local"),
    )
    async_save: bool = flag(False, "write while training goes on")
    no_save_optim: bool = flag(False, "save no optimizer state")
    no_load_optim: bool = flag(False, "load no optimizer state")
    finetune: bool = flag(False, "take the weights of --load alone, as the command finetune does")


@dataclass(frozen=True)
class Logging:
    """Logging"""

    log_interval: int = flag(100, "steps between log lines")
    log_max_attention_logit: bool = flag(
        False, "log the largest score of attention (--qk-clip always does); costs products of all queries with all keys"
    )
    metrics_file: str | None = flag(None, "append one JSON object for each logged step")
    tensorboard_dir: str | None = flag(None, "write TensorBoard events")
    wandb_project: str | None = flag(None, "log to Weights & Biases")
    wandb_exp_name: str | None = flag(None, "name of the run there")
    plot: str | None = flag(None, "draw the loss curve into this PNG at the end")
    profile: bool = flag(False, "profile some steps: marks for nsys, or with --use-pytorch-profiler a trace")
    use_pytorch_profiler: bool = flag(
        False, "write a trace (chrome://tracing, Perfetto) of each chosen rank to --tensorboard-dir, or else to --save"
    )
    profile_step_start: int = flag(10, "steps before the first that is profiled")
    profile_step_end: int = flag(12, "the last that is")
    profile_ranks: tuple[int, ...] = flag((0,), "ranks that are")
    peak_tflops: float | None = flag(None, "what one device can do, for MFU (known for common GPUs)")


@dataclass(frozen=True)
class Settings:
    """All of them, and which ones the user gave: command line or YAML."""

    model: Model = Model()
    parallel: Parallel = Parallel()
    balance: Balance = Balance()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    precision: Precision = Precision()
    recompute: Recompute = Recompute()
    data: Data = Data()
    dpo: Dpo = Dpo()
    masked: Masked = Masked()
    tasks: Tasks = Tasks()
    lora: Lora = Lora()
    checkpointing: Checkpointing = Checkpointing()
    logging: Logging = Logging()
    given: frozenset[str] = frozenset()


@cache
def subjects() -> dict[str, Any]:
    """The classes above by the name of their field in Settings, in the order of `--help`."""
    return {item.name: type(item.default) for item in fields(Settings) if item.name != "given"}


@cache
def flags() -> dict[str, tuple[str, Field[Any]]]:
    """Every setting -> (subject, its field)."""
    found = {item.name: (name, item) for name, kind in subjects().items() for item in fields(kind)}
    assert all(item.default is not MISSING for _, item in found.values())
    return found


def make_settings(values: dict[str, Any]) -> Settings:
    """From values by flag name; all others are the defaults."""
    by_subject: dict[str, dict[str, Any]] = {name: {} for name in subjects()}
    for name, value in values.items():
        by_subject[flags()[name][0]][name] = tuple(value) if isinstance(value, list) else value
    made = {name: kind(**by_subject[name]) for name, kind in subjects().items()}
    return Settings(**made, given=frozenset(values))
