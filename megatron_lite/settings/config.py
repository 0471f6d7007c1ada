"""Every setting of a run, in one frozen dataclass per subject. Flags, YAML keys and help come only from these classes.

A field has the name and meaning of Megatron-LM's flag, with underscores (`--micro-batch-size` is `micro_batch_size`). A
class's docstring is the heading under which `--help` lists its flags.
"""

from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any

from megaconv.local_paths import local_word
from megatron_lite.settings.flag import flag
from megatron_lite.settings.learning import Data, Dpo, Lora, Masked, OtherObjective, Tasks
from megatron_lite.settings.model import Model
from megatron_lite.settings.optimizers import OPTIMIZERS


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
    moe_router_dtype: str | None = flag(
        None, "precision of routers (default: the model's)", choices=("fp32", "fp64")
    )


@dataclass(frozen=True)
class Training:
    """Training"""

    micro_batch_size: int = flag(1, "sequences of one forward pass")
    global_batch_size: int | None = flag(
        None, "sequences of one step (default: micro batch x data-parallel size)"
    )
    mtp_loss_scaling_factor: float = flag(0.1, "total weight of the multi-token prediction losses")
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "START INCREMENT SAMPLES: grow the global batch from START by INCREMENTs over SAMPLES"
    )
    seq_length: int | None = flag(
        None, "tokens of a sequence (default: the model's positions, at most 4096)"
    )
    encoder_seq_length: int | None = flag(
        None, "T5: another name for --seq-length, the encoder's input"
    )
    decoder_seq_length: int = flag(
        128,
        "T5: output tokens of the decoder, one for each masked token and each masked span",
        samples=True,
    )
    train_iters: int | None = flag(None, "total number of steps")
    train_samples: int | None = flag(None, "total number of sequences, instead of --train-iters")
    epochs: int | None = flag(
        None,
        "passes over --finetune-data or --train-data, instead of --train-iters; 0: only evaluate a --task",
    )
    eval_interval: int = flag(1000, "steps between evaluations")
    eval_iters: int = flag(100, "batches of an evaluation; 0: none")
    exit_interval: int | None = flag(
        None, "save and exit (status 0) at the next step that is a multiple of this number"
    )
    exit_duration_in_mins: float | None = flag(None, "save and exit (status 0) after this long")
    seed: int = flag(1234, "seed of initial weights, data order and dropout", samples=True)
    deterministic_mode: bool = flag(
        False, "make runs on a GPU bit-identical, with slower kernels; runs on a CPU always are"
    )
    manual_gc: bool = flag(False, "collect Python's garbage on all ranks at the same step")
    manual_gc_interval: int = flag(0, "steps between garbage collections; 0: only at the start")
    no_manual_gc_eval: bool = flag(False, "no garbage collection before and after evaluations")
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, "steps between checks that data-parallel ranks hold the same weights (default: none)"
    )
    no_check_for_nan_in_loss_and_grad: bool = flag(False, "continue if the loss is NaN or infinite")


@dataclass(frozen=True)
class Optimizer:
    """Optimizer and learning rate"""

    optimizer: str = flag(
        "adam", "adam (AdamW), sgd (with momentum), or muon for the matrices of layers and adam for the rest; dist_muon: muon with "
        "--use-distributed-optimizer",
        choices=OPTIMIZERS,
    )  # fmt: skip
    sgd_momentum: float = flag(0.9, "momentum of sgd")
    muon_momentum: float = flag(0.95, "momentum of muon")
    muon_use_nesterov: bool = flag(False, "Nesterov momentum for muon")
    muon_num_ns_steps: int = flag(5, "steps of the Newton-Schulz iteration")
    muon_coefficient_type: str = flag(
        "quintic", "coefficients of the Newton-Schulz iteration", choices=("quintic", "simple")
    )
    muon_scale_mode: str = flag(
        "spectral", "factor on an update by its shape: sqrt(max(out, in)), sqrt(out / in), or the second but at least 1",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )  # fmt: skip
    muon_extra_scale_factor: float = flag(
        1.0, "additional factor on an update; with 0.2, updates are as large as Adam's"
    )
    muon_fp32_matmul_prec: str = flag(
        "medium",
        "precision of the Newton-Schulz iteration: bf16 (medium) or fp32 (highest)",
        choices=("medium", "highest"),
    )
    muon_tp_mode: str = flag(
        "blockwise",
        "update each tensor rank's shard as a matrix of its own, or gather the shards first",
        choices=("blockwise", "duplicated"),
    )
    qk_clip: bool = flag(
        False,
        "after each step, scale down query and key weights of heads with too large scores; works with any optimizer",
    )
    qk_clip_threshold: float = flag(100.0, "largest attention score that needs no clipping")
    qk_clip_alpha: float = flag(
        0.5, "exponent of the queries' share in the clipping; the keys take the rest"
    )
    lr: float | None = flag(None, "highest learning rate")
    min_lr: float = flag(0.0, "lowest learning rate")
    decoupled_lr: float | None = flag(
        None, "highest learning rate of the embedding and the head (default: --lr)"
    )
    decoupled_min_lr: float | None = flag(
        None,
        "lowest learning rate of the embedding and the head, with --decoupled-lr (default: --min-lr)",
    )
    lr_decay_style: str = flag(
        "linear",
        "decay of the learning rate",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, "steps of the decay, warm-up included (default: --train-iters)"
    )
    lr_decay_samples: int | None = flag(
        None, "samples of the decay, warm-up included (default: --train-samples)"
    )
    lr_wsd_decay_style: str = flag(
        "exponential",
        "decay in the last phase of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(None, "steps of the last phase of WSD")
    lr_wsd_decay_samples: int | None = flag(None, "samples of the last phase of WSD")
    lr_warmup_iters: int = flag(0, "steps of linear warm-up")
    lr_warmup_samples: int = flag(0, "samples of linear warm-up")
    lr_warmup_fraction: float | None = flag(None, "warm-up as a fraction of the decay")
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up")
    weight_decay: float = flag(0.01, "weight decay of matrices")
    start_weight_decay: float | None = flag(
        None, "weight decay at the start, with --weight-decay-incr-style"
    )
    end_weight_decay: float | None = flag(None, "weight decay at the end")
    weight_decay_incr_style: str = flag(
        "constant", "growth of the weight decay", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(1.0, "clip the gradient norm to this value; 0: no clipping")
    adam_beta1: float = flag(0.9, "Adam's first beta")
    adam_beta2: float = flag(0.999, "Adam's second beta")
    adam_eps: float = flag(1e-8, "Adam's epsilon")

    @property
    def kind(self) -> str:
        """The algorithm, as in OptimizerOptions.kind."""
        return OPTIMIZERS[self.optimizer].kind


@dataclass(frozen=True)
class Precision:
    """Precision (default: the checkpoint's, or fp32 for a new model)"""

    fp32: bool = flag(False, "compute in fp32")
    bf16: bool = flag(False, "compute in bf16, with fp32 main weights and gradients")
    fp16: bool = flag(
        False, "compute in fp16, with fp32 main weights and gradients and a scaled loss"
    )
    loss_scale: float | None = flag(None, "constant loss scale (default: dynamic)")
    initial_loss_scale: float = flag(2.0**32, "initial value of the dynamic loss scale")
    min_loss_scale: float = flag(1.0, "smallest dynamic loss scale")
    loss_scale_window: int = flag(1000, "steps without overflow until the loss scale doubles")
    hysteresis: int = flag(2, "overflows until the loss scale halves")
    fp8_format: str | None = flag(
        None,
        "multiply the matrices of layers in FP8: e4m3, or e4m3 with gradients in e5m2 (hybrid)",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = flag(
        "delayed", "unit of one FP8 scale: a tensor by its current values (tensorwise) or by earlier steps (delayed), or blocks",
        choices=("tensorwise", "delayed", "blockwise", "mxfp8"),
    )  # fmt: skip
    fp8_margin: int = flag(0, "margin of FP8 scales below the maximum, in powers of two")
    fp8_amax_history_len: int = flag(1, "earlier steps in the history of delayed scales")
    fp8_amax_compute_algo: str = flag(
        "most_recent",
        "value of the history that delayed scales use",
        choices=("most_recent", "max"),
    )
    no_fp8_wgrad: bool = flag(False, "compute gradients of weights in bf16")
    first_last_layers_bf16: bool = flag(False, "keep the first and last layers in bf16")
    num_layers_at_start_in_bf16: int = flag(1, "first layers that stay in bf16")
    num_layers_at_end_in_bf16: int = flag(1, "last layers that stay in bf16")

    @property
    def chosen(self) -> bool:
        """True if a flag sets the precision."""
        return self.bf16 or self.fp16 or self.fp32

    @property
    def dtype(self) -> str:
        """The dtype by torch's name."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"


PRECISION_FLAGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""A dtype -> the flag that selects it."""


@dataclass(frozen=True)
class Recompute:
    """Recomputation and compilation"""

    recompute_granularity: str | None = flag(
        None,
        "activations that the backward pass recomputes: whole layers (full), or only cheap ones (selective)",
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        None, "for full: groups of all layers of a stage (uniform), or the first layers of each chunk (block)",
        choices=("uniform", "block"),
    )  # fmt: skip
    recompute_num_layers: int | None = flag(
        None, "layers of a group (uniform), or recomputed layers (block)"
    )
    compile: bool = flag(False, "compile each layer with torch.compile")


@dataclass(frozen=True)
class Checkpointing:
    """Checkpoints"""

    load: str | None = flag(
        None, "checkpoint to start from: any that megaconv reads, or a Hub id; with the same path as --save, it acts like --resume",
        remote=True,
    )  # fmt: skip
    save: str | None = flag(None, "directory to save to")
    save_interval: int | None = flag(None, "steps between saves (default: at the end only)")
    resume: bool = flag(
        False, "continue from --save if it holds a checkpoint, else start as the other flags say"
    )
    keep_last: int | None = flag(None, "number of checkpoints to keep; older ones are removed")
    ckpt_format: str = flag("torch_dist", "format to save in", choices=("torch_dist", "torch"))
    transformer_impl: str = flag(
        "transformer_engine",
        "modules whose _extra_state a checkpoint lists; transformer_engine, if installed, also computes FP8",
        choices=("transformer_engine", "local"),
    )
    async_save: bool = flag(False, "write checkpoints during training")
    no_save_optim: bool = flag(False, "save no optimizer state")
    no_load_optim: bool = flag(False, "load no optimizer state")
    finetune: bool = flag(False, "load only the weights of --load, as the command finetune does")


@dataclass(frozen=True)
class Logging:
    """Logging"""

    log_interval: int = flag(100, "steps between log lines")
    log_max_attention_logit: bool = flag(
        False,
        "log the largest attention score, at the cost of all products of queries and keys; --qk-clip always logs it",
    )
    metrics_file: str | None = flag(None, "append one JSON object for each logged step")
    tensorboard_dir: str | None = flag(None, "write TensorBoard events")
    wandb_project: str | None = flag(None, "log to Weights & Biases")
    wandb_exp_name: str | None = flag(None, "name of the run in Weights & Biases")
    plot: str | None = flag(None, "draw the loss curve into this PNG at the end")
    profile: bool = flag(
        False, "profile some steps: marks for nsys, or with --use-pytorch-profiler a trace"
    )
    use_pytorch_profiler: bool = flag(
        False,
        "write a trace (chrome://tracing, Perfetto) of each profiled rank to --tensorboard-dir, or else to --save",
    )
    profile_step_start: int = flag(10, "steps before the first profiled step")
    profile_step_end: int = flag(12, "last profiled step")
    profile_ranks: tuple[int, ...] = flag((0,), "profiled ranks")
    peak_tflops: float | None = flag(
        None, "peak TFLOP/s of one device, for MFU (default: known values of common GPUs)"
    )


@dataclass(frozen=True)
class Settings:
    """All settings, and the names of those that the user set on the command line or in YAML."""

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
    objective: OtherObjective = OtherObjective()
    lora: Lora = Lora()
    checkpointing: Checkpointing = Checkpointing()
    logging: Logging = Logging()
    given: frozenset[str] = frozenset()


@cache
def subjects() -> dict[str, Any]:
    """Return the classes above by the name of their field in Settings, in the order of `--help`."""
    return {item.name: type(item.default) for item in fields(Settings) if item.name != "given"}


@cache
def flags() -> dict[str, tuple[str, Field[Any]]]:
    """Return every setting -> (subject, its field)."""
    found = {item.name: (name, item) for name, kind in subjects().items() for item in fields(kind)}
    assert all(item.default is not MISSING for _, item in found.values())
    return found


def _refuse_uris(value: Any) -> None:
    for word in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(word, str):
            local_word(word)


def make_settings(values: dict[str, Any]) -> Settings:
    """Return settings from values by flag name; others get their defaults.

    Raises UsageError for a URI where a path is needed.
    """
    by_subject: dict[str, dict[str, Any]] = {name: {} for name in subjects()}
    for name, value in values.items():
        subject, flag = flags()[name]
        if not flag.metadata["remote"]:
            _refuse_uris(value)
        by_subject[subject][name] = tuple(value) if isinstance(value, list) else value
    made = {name: kind(**by_subject[name]) for name, kind in subjects().items()}
    return Settings(**made, given=frozenset(values))
