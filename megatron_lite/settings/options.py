"""Options to run and optimize a model.

The architecture is in megaconv.model.config.ModelConfig, the layout in megatron_lite.parallel.grid.
"""

from dataclasses import dataclass

from megaconv.planning.recomputation import KEEP_ALL
from megaconv.planning.recomputation import Recompute as Recompute


@dataclass(frozen=True)
class Balancing:
    """Load balancing of experts. The names are Megatron's."""

    losses: tuple[tuple[str, float], ...] = ()
    """(`aux_loss`, `seq_aux_loss` or `global_aux_loss`, coefficient)."""
    z_loss: float = 0.0
    """Coefficient of the z-loss."""
    bias_rate: float = 0.0
    """Step size for the bias of each expert, in routers with a bias."""
    capacity_factor: float | None = None
    """Largest number of tokens per expert, as a multiple of an even share; None: unlimited."""
    drop_policy: str = "probs"
    """The rule for the tokens that an expert takes: see moe/capacity.py."""
    router_dtype: str | None = None
    """Dtype in which the router computes; None: the dtype of its input."""
    pads: bool = False
    """True if each expert gets as many rows as it has capacity: see moe/padding.py."""

    @property
    def padded_to(self) -> float | None:
        """The capacity factor that experts are padded to; None: no padding."""
        return self.capacity_factor if self.pads else None


CONTEXT = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""Methods of context parallelism, by Megatron's names.

- `p2p`: keys and values pass through a ring.
- `all_gather`: keys and values are gathered.
- `a2a`: each rank gets some heads of all tokens.
- `a2a+p2p`: a2a among near ranks, p2p among far ranks.
"""


ATTENTION = ("auto", "flash", "fused", "unfused", "local")
"""Kernels of attention, by Megatron's names. They differ on a GPU.

- `auto`: FlashAttention if it is installed and supports the inputs, else PyTorch's choice, which may be cuDNN's kernel.
- `flash`: FlashAttention if it is installed, else PyTorch's flash attention.
- `fused`: cuDNN's kernel through PyTorch.
- `unfused`, `local`: plain products and a softmax, which keep all scores.
"""


@dataclass(frozen=True)
class LoRA:
    """Adapters of frozen matrices. The names are peft's."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("all-linear",)
    """Ends of modules' paths in transformers or Megatron core; `all-linear`: the matrices of all layers."""
    dropout: float = 0.0
    """Dropout of the adapters' input."""
    rslora: bool = False
    """Divide alpha by the rank's square root."""
    dora: bool = False
    """DoRA: train the length of each row of an adapted matrix too."""
    whole: tuple[str, ...] = ()
    """Megatron core's paths of the modules that are trained whole: the embedding, the head."""

    rows: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(Megatron core's path of the embedding or the head, tokens in ascending order) whose rows are trained alone."""

    @property
    def tokens(self) -> list[int]:
        """All tokens whose rows are trained alone, in ascending order."""
        return sorted({token for _, tokens in self.rows for token in tokens})

    def tokens_of(self, path: str) -> tuple[int, ...]:
        """Return the tokens whose rows are trained alone in a module. path: Megatron core's."""
        return dict(self.rows).get(path, ())

    def freezes(self, name: str) -> bool:
        """Return whether a parameter of the model keeps its value. name: Megatron core's."""
        return name.rpartition(".")[0] not in self.whole

    @property
    def scale(self) -> float:
        """The factor of B (A x)."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True)
class Distillation:
    """The loss of a student: (1 - alpha) * cross entropy + alpha * divergence from a teacher."""

    alpha: float = 1.0
    temperature: float = 1.0
    """Divisor of both models' logits in the divergence."""
    beta: float = 0.0
    """The kind of divergence; see models/divergence.py."""


@dataclass(frozen=True, kw_only=True)
class FP8:
    """FP8 products of the layers' matrices (products/fp8.py). The names are Megatron's."""

    format: str = "hybrid"
    """`e4m3`, or `hybrid`: gradients in e5m2."""
    recipe: str = "delayed"
    """`tensorwise`, `delayed`, `blockwise` or `mxfp8`."""
    margin: int = 0
    """The number of powers of two by which scales stay below the largest possible scale."""
    history: int = 1
    """Number of steps in the history of delayed scales."""
    algorithm: str = "most_recent"
    """The element of the history that counts: `most_recent` or `max`."""
    weight_gradient: bool = True
    """True if gradients of weights are FP8 products too."""
    first_in_bf16: int = 0
    last_in_bf16: int = 0
    """Number of layers at the start and at the end without FP8."""
    transformer_engine: bool = True
    """Use Transformer Engine's products if it is installed and the run is on GPUs; else torch's."""


@dataclass(frozen=True)
class RetrievalOptions:
    """Options of Retro. The names are Megatron's."""

    gate: float = 1.0
    """A factor on the output of cross attention to retrieved text. 0: it is not computed, and not trained."""
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    """Dropout in the encoder's layers."""


@dataclass(frozen=True)
class ModelOptions:
    """Options of the forward and backward passes."""

    dtype: str = "bfloat16"
    """Dtype of parameters and activations: `bfloat16`, `float16`, `float32`. Gradients are summed in float32."""
    sequence_parallel: bool = False
    """True if each tensor rank keeps its part of the sequence between the matrices of a layer."""
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    recompute: Recompute = KEEP_ALL
    offloaded_layers: int = 0
    """First layers whose activations wait for the backward pass in pinned main memory; no effect on a CPU."""
    attention: str = "auto"
    """One of ATTENTION."""
    trains: bool = True
    """True if there will be backward passes. Without them, a mixture of experts can be sharded in more ways."""
    compile: bool = False
    """torch.compile each layer."""
    context: str = "p2p"
    """The method of context parallelism: one of CONTEXT."""
    near: int = 1
    """For a2a+p2p: number of neighbouring context ranks that exchange heads for tokens."""
    loss_rows: int | None = None
    """Tokens whose logits exist at a time; None: chosen for the device (models/loss.py)."""
    loss_temperature: float = 1.0
    """Divisor of the logits in the labels' log-probabilities."""
    fp8: FP8 | None = None
    """FP8 products of layers; None: products in `dtype`."""
    balance: Balancing = Balancing()
    dispatcher: str = "alltoall"
    """The method to exchange tokens with other ranks' experts: models/moe/experts.py."""
    lora: LoRA | None = None
    """Train only adapters; None: train all parameters."""
    retrieval: RetrievalOptions = RetrievalOptions()
    mtp_loss_scale: float = 0.1
    """Weight of all losses of further tokens together, relative to the loss of the next token."""
    vocab_divisor: int = 128
    """The vocabulary is padded to a multiple of this times tp. The padding takes no part in the loss."""
    seed: int = 1234
    """Seed of dropout."""
    local_layers: bool = False
    """True if norms have the form of Megatron's local layers, else of Transformer Engine's. The function is the same."""


@dataclass(frozen=True)
class LossScale:
    """fp16's factor of the loss: halved after `hysteresis` overflows, doubled after `window` steps without one."""

    initial: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    constant: float | None = None
    """A constant factor; None: the factor is dynamic."""


@dataclass(frozen=True)
class MuonOptions:
    """Options of Muon, with Megatron's names and defaults."""

    momentum: float = 0.95
    nesterov: bool = False
    steps: int = 5
    """Steps of the Newton-Schulz iteration."""
    coefficients: str = "quintic"
    """`quintic` or `simple`: megatron_lite/optimizer/muon_update.py."""
    scale_mode: str = "spectral"
    """`spectral`, `unit_rms_norm`, `shape_scaling`: the factor of an update, which depends on its shape."""
    factor: float = 1.0
    """A further factor for any shape."""
    precision: str = "medium"
    """Precision of the iteration: `medium` is bf16, `highest` fp32."""
    tp_mode: str = "blockwise"
    """`blockwise`: each tensor rank's part is a separate matrix; `duplicated`: the parts are gathered, as in one process."""


@dataclass(frozen=True)
class QkClip:
    """Options of QK-clip, with Megatron's names and defaults: megatron_lite/optimizer/qk_clip.py."""

    alpha: float = 0.5
    """The queries' share as an exponent; the keys have the rest."""
    threshold: float = 100.0
    """The largest attention score that is not clipped."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of parameter updates. Learning rate and weight decay are arguments of each step."""

    kind: str = "adamw"
    """A name in megatron_lite/optimizer/algorithms.py: `adamw`, `sgd`, or `muon` (AdamW for all but matrices of layers)."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    """Momentum of sgd."""
    muon: MuonOptions = MuonOptions()
    clip_grad: float = 1.0
    """Largest norm of all gradients together; 0: unlimited."""
    bf16_reduce: bool = False
    """Send gradients in bf16 between ranks."""
    distributed: bool = False
    """Shard state and fp32 masters over the data-parallel ranks (ZeRO 1)."""
    shards_gradients: bool = False
    """Shard gradients too (ZeRO 2). Requires `distributed`."""
    shards_parameters: bool = False
    """Shard parameters too (ZeRO 3). Requires `shards_gradients`."""
    fuses_accumulation: bool = True
    """Add the products of matrices' gradients directly to the float32 sums. Compiled layers don't."""
    bucket_elements: int = 40_000_000
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    loss_scale: LossScale = LossScale()
    """Used only with float16."""
    qk_clip: QkClip | None = None
    """Applied after each step; None: no clipping."""
    log_scores: bool = False
    """Report the largest attention score even without clipping."""
    exp_avg_dtype: str = "float32"
    exp_avg_sq_dtype: str = "float32"
    """Dtypes in which Adam's moments are kept: `float32` or `bfloat16`. Updates are computed in float32."""
    main_grads_dtype: str = "float32"
    """The dtype in which gradients are summed over microbatches and ranks: `float32`, or `bfloat16` in a bf16 model."""

    def gradient_dtype(self, *, in_float32: bool) -> str:
        """Return the dtype of a parameter's sum of gradients. in_float32: whether the parameter is float32 in any model."""
        return "float32" if in_float32 else self.main_grads_dtype

    def sent_dtype(self, *, in_float32: bool) -> str:
        """Return the dtype in which data-parallel ranks send a parameter's gradients."""
        return "bfloat16" if self.bf16_reduce else self.gradient_dtype(in_float32=in_float32)

    def state_dtype(self, name: str) -> str:
        """Return the dtype of a state tensor. name: Adam's or SGD's."""
        narrow = {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}
        return narrow.get(name, "float32")

    @property
    def sharding(self) -> str:
        """Return what data-parallel ranks shard, by Megatron's name."""
        if not self.distributed:
            return "no_shard"
        if self.shards_parameters:
            return "optim_grads_params"
        return "optim_grads" if self.shards_gradients else "optim"
