"""How a model is run and optimized, beside what it is (megaconv.model.config.ModelConfig) and where (megatron_lite.parallel.grid)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation: what the backward pass computes again instead of keeping it, by Megatron's names."""

    granularity: str | None = None
    """None; `full`: whole layers; `selective`: norms and activation functions alone."""
    method: str = "uniform"
    """Of full: `uniform`: groups of `layers` layers, all of them; `block`: the first `layers` of each chunk, one by one."""
    layers: int = 1


@dataclass(frozen=True)
class Balancing:
    """What keeps the experts of a mixture equally busy, by Megatron's names."""

    losses: tuple[tuple[str, float], ...] = ()
    """(`aux_loss`, `seq_aux_loss` or `global_aux_loss`, coefficient)."""
    z_loss: float = 0.0
    """Coefficient."""
    bias_rate: float = 0.0
    """How far a step moves the bias of each expert of routers that have one."""
    capacity_factor: float | None = None
    """Of the tokens that each expert would get if they were shared out evenly, how many it takes; None: all that come."""
    drop_policy: str = "probs"
    """Which it takes: see moe/capacity.py."""
    router_dtype: str | None = None
    """In which the router computes; None: that of its input."""


CONTEXT = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""Keys and values wander in a ring, are gathered, or each rank gets some heads of all tokens; or the last among near ranks and the first
among far ones. By Megatron's words."""


@dataclass(frozen=True)
class LoRA:
    """Adapters beside frozen matrices, by peft's names."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("all-linear",)
    """Ends of modules' paths, as transformers or Megatron core calls them; `all-linear`: those of all layers."""
    dropout: float = 0.0
    """Of what the adapters see."""
    rslora: bool = False
    """Divide alpha by the rank's square root."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True)
class FP8:
    """How the matrices of layers are multiplied, by Megatron's names: parallel/fp8.py."""

    format: str = "hybrid"
    """`e4m3`, or `hybrid`: gradients in e5m2."""
    recipe: str = "delayed"
    """`tensorwise`, `delayed`, `blockwise` or `mxfp8`."""
    margin: int = 0
    """Powers of two that a scale stays below the largest."""
    history: int = 1
    """Steps that delayed scales look back."""
    algorithm: str = "most_recent"
    """`most_recent` of these, or `max`."""
    weight_gradient: bool = True
    """Whether gradients of weights are products in FP8 too."""
    first_in_bf16: int = 0
    last_in_bf16: int = 0
    """Layers that have none."""
    transformer_engine: bool = True
    """Its products where it is installed and a GPU is there; else torch's."""


@dataclass(frozen=True)
class Preference:
    """Direct preference optimization: what is learned of a pair of answers, the chosen one's row before the rejected one's."""

    beta: float = 0.1
    """Of rewards, which are beta times how much likelier an answer has become than under the reference."""
    loss: str = "sigmoid"
    """`sigmoid`, `hinge` or `ipo`: models/preference.py."""
    label_smoothing: float = 0.0
    """How probable it is that a pair is the wrong way round."""


@dataclass(frozen=True)
class ModelOptions:
    """How the forward and backward passes run."""

    dtype: str = "bfloat16"
    """Of parameters and activations: `bfloat16`, `float16`, `float32`. Gradients are summed in float32."""
    sequence_parallel: bool = False
    """Between the matrices of a layer each tensor rank keeps its part of the sequence."""
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    recompute: Recompute = Recompute()
    attention: str = "auto"
    """`sdpa`; `flash` (flash-attn, on a GPU); `auto`: flash where it is installed and fits."""
    trains: bool = True
    """Whether anything will go backward; a mixture of experts can be sharded in more ways where nothing does."""
    compile: bool = False
    """torch.compile each layer."""
    context: str = "p2p"
    """How attention brings queries to the keys of other ranks where several share a sequence: a word of CONTEXT."""
    near: int = 1
    """Of a2a+p2p, how many neighbours among the context ranks take heads for tokens."""
    loss_rows: int | None = None
    """Tokens whose logits exist at one time; None: what the device likes (models/loss.py)."""
    fp8: FP8 | None = None
    """Of the products of layers; None: they are in dtype."""
    balance: Balancing = Balancing()
    dispatcher: str = "alltoall"
    """How tokens get to experts of other ranks: models/moe/experts.py."""
    lora: LoRA | None = None
    """Nothing but adapters is trained; None: everything is."""
    preference: Preference | None = None
    """What is learned of microbatches that have a reference; None: each label for itself."""
    mtp_loss_scale: float = 0.1
    """What all losses of further tokens together count for, beside the loss of the next."""
    vocab_divisor: int = 128
    """The vocabulary is padded to a multiple of this times tp. The padding takes no part in the loss."""
    seed: int = 1234
    """Of dropout."""


@dataclass(frozen=True)
class LossScale:
    """fp16's factor on the loss: halved after `hysteresis` overflows, doubled after `window` steps without one."""

    initial: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    constant: float | None = None
    """This factor for ever instead."""


@dataclass(frozen=True)
class MuonOptions:
    """Of Muon, by Megatron's names and with its defaults."""

    momentum: float = 0.95
    nesterov: bool = False
    steps: int = 5
    """Of Newton and Schulz's iteration."""
    coefficients: str = "quintic"
    """`quintic` or `simple`: megatron_lite/parallel/muon.py."""
    scale_mode: str = "spectral"
    """`spectral`, `unit_rms_norm`, `shape_scaling`: what an update is multiplied with, by its shape."""
    factor: float = 1.0
    """And for any shape."""
    precision: str = "medium"
    """Of the iteration: `medium` is bf16, `highest` fp32."""
    tp_mode: str = "blockwise"
    """`blockwise`: each tensor rank's part is a matrix of its own; `duplicated`: they are gathered, as in one process."""


@dataclass(frozen=True)
class QkClip:
    """By Megatron's names and with its defaults: megatron_lite/models/qk_clip.py."""

    alpha: float = 0.5
    """The queries' share; the keys' is the rest."""
    threshold: float = 100.0
    """The largest score of attention that is left alone."""


@dataclass(frozen=True)
class OptimizerOptions:
    """How parameters are updated. Learning rate and weight decay are arguments of each step."""

    kind: str = "adamw"
    """`adamw`, `sgd` or `muon` (which is AdamW's for all but the matrices of layers)."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    """Of sgd."""
    muon: MuonOptions = MuonOptions()
    clip_grad: float = 1.0
    """The largest norm of all gradients together; 0: any."""
    bf16_reduce: bool = False
    """Send gradients in bf16 from rank to rank."""
    distributed: bool = False
    """Share state and fp32 masters over the data-parallel ranks (ZeRO 1)."""
    bucket_elements: int = 40_000_000
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    loss_scale: LossScale = LossScale()
    """Used with float16 alone."""
    qk_clip: QkClip | None = None
    """After each step; None: not at all."""
    tell_scores: bool = False
    """Report the largest score of attention also where nothing is clipped."""
