"""The subjects of a model's description (config.py): attention, MLP, experts, positions …, each with what decides its function."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerKind:
    """What one layer of the decoder (or of the only stack) is made of."""

    mixer: str = "attention"
    """What mixes tokens: `attention`, `linear` (a gated delta net), `mamba` (a Mamba 2), or `none` in a layer that is an MLP alone."""
    mlp: str = "dense"
    """`dense`, `experts`, or `none` in a layer that is a mixer alone."""
    window: int | None = None
    """Number of positions that a token attends to, itself included; None for all."""
    rotates: bool = True
    """Whether rope, where the model has it, rotates q and k of this layer."""


@dataclass(frozen=True)
class Attention:
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """Whether q and k are normed before they rotate."""
    qk_norm_width: str = "head"
    """What one such norm is over: each `head` alone, or `all` heads of a projection at once."""
    qk_l2_norm: bool = False
    """Whether q and k of layers that rotate are divided by the root of the mean of their squares: a norm without weights."""
    sinks: bool = False
    """Whether each head has a logit of its own in the softmax of attention, which takes weight and gives no value."""
    scale: float | None = None
    """A factor on attention scores; None: one over the square root of head_dim."""
    score_cap: float | None = None
    """Scores are squeezed between plus and minus this by tanh; None: they aren't."""
    output_gate: bool = False
    """Whether a sigmoid of a further projection, as wide as q, scales what attention gives."""


@dataclass(frozen=True)
class LinearAttention:
    """Of layers whose mixer is `linear`: gated delta nets (arXiv 2412.06464); all 0 in models without."""

    key_heads: int = 0
    """Of q as of k; each serves as many value heads."""
    value_heads: int = 0
    key_dim: int = 0
    """Elements of one key head."""
    value_dim: int = 0
    conv: int = 0
    """Positions that the convolution over q, k and v sees, the token's own included."""


@dataclass(frozen=True)
class Mamba:
    """Of layers whose mixer is `mamba`: Mamba 2 (arXiv 2405.21060), with a convolution over 4 positions; all 0 in models without."""

    heads: int = 0
    head_dim: int = 0
    groups: int = 0
    """Of heads, each of which has one B and one C."""
    state: int = 0
    """Elements of B and of C."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); all 0 without."""

    kv_rank: int = 0
    """Width of the latent vector that keys and values are made of."""
    q_rank: int = 0
    """Width of the one that queries are made of; 0 where they are made directly."""
    rope_dim: int = 0
    """The part of head_dim that rotates: its last elements, in pairs, one for all heads of keys."""
    v_dim: int = 0
    """Elements of a head's values."""


@dataclass(frozen=True)
class Indexer:
    """Of latent attention, which then is sparse: it chooses the positions that a token attends to (DeepSeek V3.2); all 0 without."""

    heads: int = 0
    head_dim: int = 0
    """Of which `latent.rope_dim` elements rotate."""
    topk: int = 0
    """Positions that are chosen for each token."""
    interleaved: bool = False
    """Whether an element rotates with its neighbour, and not with the one half of those that rotate further."""


@dataclass(frozen=True)
class Positions:
    """How a model knows a token's position."""

    kind: str = "rope"
    """`rope`, `learned` (a table of max_positions rows), `relative` (biases on attention scores) or `none`."""
    theta: float = 10000.0
    local_theta: float | None = None
    """Of layers with a window, where they have a base of their own; `scaling` is then of the other layers alone."""
    scaling: Mapping[str, Any] | None = None
    """As Hugging Face spells it, with `rope_type`; None when positions are not scaled."""
    rotary_percent: float = 1.0
    """The part of a head, from its first element on, that rotates."""
    interleaved: bool = False
    """Whether an element rotates with its neighbour, and not with the one half a head further."""
    buckets: int = 0
    """Distances that relative positions distinguish, the largest of which is max_distance."""
    max_distance: int = 0


@dataclass(frozen=True)
class Norm:
    kind: str = "RMSNorm"
    """`RMSNorm`, or `LayerNorm`, which has biases."""
    epsilon: float = 1e-5
    zero_centered: bool = False
    """Whether a norm multiplies with its weight + 1."""
    place: str = "before"
    """`before` each sublayer; `after` it, of its output before that is added; `both`; or `after_sum`: of a sublayer's output
    and what it was given, as in the original BERT."""
    final: bool = True
    """Whether one follows the last layer."""


@dataclass(frozen=True)
class MLP:
    """Of dense layers; activation, gate and clamp are those of experts too."""

    ffn: int
    activation: str = "silu"
    """`silu`, `relu`, `relu2` (its square), `gelu` (exact), `gelu_tanh` (its approximation) or `quick_gelu` (x * sigmoid(1.702 x))."""
    gated: bool = True
    """Whether the activation's output is multiplied with a second projection."""
    bias: bool = False
    clamp: float | None = None
    """The first projection is clamped to it from above, the second one from both sides; None: neither."""
    offset: float = 0.0
    """Added to the second projection."""


@dataclass(frozen=True)
class Experts:
    """Of layers whose MLP is a mixture of experts; count 0 for a dense model."""

    count: int = 0
    per_token: int = 0
    ffn: int = 0
    """Width of one routed expert."""
    shared_ffn: int = 0
    """Width of the expert that every token passes; 0 without one."""
    shared_gate: bool = False
    """Whether a gate scales the shared expert's output."""
    score: str = "softmax"
    """What turns router logits into weights: `softmax` or `sigmoid`."""
    renormalize: bool = True
    """Whether the weights of the experts that were chosen are made to sum up to 1."""
    scale: float | None = None
    """A factor on those weights."""
    groups: int | None = None
    group_topk: int | None = None
    """Experts are chosen from the best group_topk of `groups` groups; None without groups."""
    router_bias: bool = False
    """Whether a bias per expert, in fp32, takes part in the choice (and not in the weights)."""
    latent: int = 0
    """Width of what routed experts work on, a projection of the hidden states and back; 0 where these are it."""
    probs_on_input: bool = False
    """Whether those weights scale what experts are given, and not what they give."""


@dataclass(frozen=True)
class Encoder:
    """A stack that the decoder attends to."""

    layers: int = 0
    """0 where there is one stack."""


@dataclass(frozen=True)
class Head:
    """What follows the last layer, besides a matrix."""

    bias: bool = False
    """Whether a head that may lack it has a bias per word."""
    activation: str = ""
    """Of the transform before a masked-language-model head, with the values of `mlp.activation`; empty without one."""
    binary: bool = False
    """Whether a pooler and a head say if two segments follow each other."""
    classes: int = 0
    """That a head tells apart by the pooled first token (classification); 0 without one."""
    choices: bool = False
    """Whether a head gives the pooled first token of each of several choices a score (multiple choice)."""
    logit_cap: float | None = None
    """Logits are squeezed between plus and minus this by tanh; None: they aren't."""
