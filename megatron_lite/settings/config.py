"""Every setting of a run, in one frozen dataclass per subject. Flags, YAML keys and help come only from these classes.

A field has the name and meaning of Megatron-LM's flag, with underscores (`--micro-batch-size` is `micro_batch_size`). A
class's docstring is the heading under which `--help` lists its flags.
"""

from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any

from formats.stores.addresses import is_store
from megaconv.local_paths import local_word
from megatron_lite.settings.distilling import Distilling
from megatron_lite.settings.embedding import Embedding
from megatron_lite.settings.flag import flag
from megatron_lite.settings.grpo import Grpo
from megatron_lite.settings.learning import (
    Data,
    Dpo,
    Kto,
    Lora,
    Masked,
    OtherObjective,
    Rewards,
    Tasks,
)
from megatron_lite.settings.model import Model
from megatron_lite.settings.optimization import Optimizer, Precision
from megatron_lite.settings.options import ATTENTION
from megatron_lite.settings.parallel import Balance, Parallel
from megatron_lite.settings.retrieval import Retrieval
from megatron_lite.settings.retro import Retro


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
    step_batch_size_schedule: str | None = flag(
        None,
        'global batches from numbers of tokens on, instead of --global-batch-size, such as "0:768 250B:1536"',
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
    train_samples: int | None = flag(
        None, "total number of sequences, instead of --train-iters; those that fill no step at the end are left out"
    )  # fmt: skip
    epochs: int | None = flag(
        None,
        "passes over --finetune-data, --train-data or one corpus, instead of --train-iters; 0: only evaluate a --task",
    )
    eval_interval: int = flag(1000, "steps between evaluations")
    eval_iters: int = flag(100, "batches of an evaluation; 0: none")
    early_stopping_patience: int | None = flag(
        None, "save and exit (status 0) after this many evaluations without a lower validation loss"
    )
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
class Recompute:
    """Recomputation, offload, compilation and kernels"""

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
    cpu_offloading_num_layers: int = flag(
        0, "first layers whose activations wait for the backward pass in pinned main memory"
    )
    compile: bool = flag(False, "compile each layer with torch.compile")
    no_gradient_accumulation_fusion: bool = flag(
        False, "add gradients of matrices to their sums after the products, not inside them"
    )
    attention_backend: str = flag(
        "auto", "kernel of attention on a GPU: FlashAttention or PyTorch's choice (auto), flash attention (flash), cuDNN's (fused), "
        "or products and a softmax (unfused, local)", choices=ATTENTION,
    )  # fmt: skip


@dataclass(frozen=True)
class Checkpointing:
    """Checkpoints"""

    load: str | None = flag(
        None, "checkpoint to start from: any that megaconv reads, or a Hub id; with the same path as --save, it acts like --resume",
        remote=True,
    )  # fmt: skip
    save: str | None = flag(
        None, "directory to save to, or a URI of a store (s3://, gs://, az://)", remote=True
    )
    save_interval: int | None = flag(None, "steps between saves (default: at the end only)")
    resume: bool = flag(
        False, "continue from --save if it holds a checkpoint, else start as the other flags say"
    )
    keep_last: int | None = flag(None, "number of checkpoints to keep; older ones are removed")
    keep_best: bool = flag(
        False,
        "save after each evaluation with the lowest validation loss so far; --keep-last doesn't remove this checkpoint",
    )
    save_delta: int | None = flag(
        None, "keep one full checkpoint of every N, and the others as patches in deltas/; the newest is always full"
    )  # fmt: skip
    ckpt_format: str = flag("torch_dist", "format to save in", choices=("torch_dist", "torch"))
    ckpt_convert_format: str | None = flag(
        None, "make no step: save the checkpoint of --load in this format", choices=("torch_dist", "torch")
    )  # fmt: skip
    ckpt_convert_save: str | None = flag(
        None, "directory for it; the format's name is added to the path"
    )
    transformer_impl: str = flag(
        "transformer_engine",
        "modules whose _extra_state a checkpoint lists; transformer_engine, if installed, also computes FP8",
        choices=("transformer_engine", "local"),
    )
    async_save: bool = flag(False, "write checkpoints during training")
    no_save_optim: bool = flag(False, "save no optimizer state")
    no_load_optim: bool = flag(False, "load no optimizer state")
    finetune: bool = flag(False, "load only the weights of --load, as the command finetune does")
    exit_on_missing_checkpoint: bool = flag(
        False, "start no run from random weights: end if --load, with the same path as --save, holds no checkpoint"
    )  # fmt: skip


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
    guide: bool = flag(
        False,
        "check memory before the start; at the end show answers from before and after, the loss curve and the next commands",
    )
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
    kto: Kto = Kto()
    rewards: Rewards = Rewards()
    embeddings: Embedding = Embedding()
    grpo: Grpo = Grpo()
    distilling: Distilling = Distilling()
    masked: Masked = Masked()
    tasks: Tasks = Tasks()
    retro: Retro = Retro()
    retrieval: Retrieval = Retrieval()
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


_STORED = ("save", "data_path", "train_data_path", "valid_data_path", "test_data_path")
"""Settings that may be the URI of a store, and no other URI."""


def _refuse_uris(value: Any, *, but_stores: bool) -> None:
    for word in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(word, str) and not (but_stores and is_store(word)):
            local_word(word)


def make_settings(values: dict[str, Any]) -> Settings:
    """Return settings from values by flag name; others get their defaults.

    Raises UsageError for a URI where a path is needed.
    """
    by_subject: dict[str, dict[str, Any]] = {name: {} for name in subjects()}
    for name, value in values.items():
        subject, flag = flags()[name]
        if name in _STORED or not flag.metadata["remote"]:
            _refuse_uris(value, but_stores=name in _STORED)
        by_subject[subject][name] = tuple(value) if isinstance(value, list) else value
    made = {name: kind(**by_subject[name]) for name, kind in subjects().items()}
    return Settings(**made, given=frozenset(values))
