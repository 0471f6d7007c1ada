"""The settings of the optimizer, the learning rate and the precision. settings/config.py says how flags follow from a class."""

from dataclasses import dataclass

from megatron_lite.settings.flag import flag
from megatron_lite.settings.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Optimizer:
    """Optimizer and learning rate"""

    optimizer: str = flag(
        "adam", "adam (AdamW), sgd (with momentum), or muon for the matrices of layers and adam for the rest; dist_muon: muon with "
        "--use-distributed-optimizer",
        choices=OPTIMIZERS,
    )  # fmt: skip
    use_precision_aware_optimizer: bool = flag(
        False, "keep gradients and Adam's moments in the dtypes of --main-grads-dtype, --exp-avg-dtype and --exp-avg-sq-dtype"
    )  # fmt: skip
    main_grads_dtype: str = flag(
        "fp32", "dtype in which gradients are summed over microbatches and ranks; bf16: only with --bf16", choices=("fp32", "bf16")
    )  # fmt: skip
    exp_avg_dtype: str = flag("fp32", "dtype of Adam's first moment", choices=("fp32", "bf16"))
    exp_avg_sq_dtype: str = flag("fp32", "dtype of Adam's second moment", choices=("fp32", "bf16"))
    sgd_momentum: float = flag(0.9, "momentum of sgd")
    muon_momentum: float = flag(0.9, "momentum of muon")
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
        if self.bf16:
            return "bfloat16"
        return "float16" if self.fp16 else "float32"


PRECISION_FLAGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""A dtype -> the flag that selects it."""
