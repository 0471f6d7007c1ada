"""The configuration of a model, complete: everything that any target format has to write."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.model.ceilings import require_possible


@dataclass(frozen=True)
class ModelConfig:
    """One model. Sizes are those of the whole model, before any sharding or padding."""

    family: str
    layers: int
    """Of the decoder, or of the only stack."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    """As Hugging Face spells it, with `rope_type`; None when positions are not scaled."""
    positions: str = "rope"
    """How a token's place is told: `rope`, `learned` (a table of max_positions rows) or `relative` (biases on attention)."""
    normalization: str = "RMSNorm"
    """`RMSNorm`, or `LayerNorm`, which has biases."""
    activation: str = "silu"
    """Of the MLP: `silu`, `relu`, `gelu` (exact), `gelu_tanh` (its approximation) or `quick_gelu` (x * sigmoid(1.702 x))."""
    gated: bool = True
    """Whether the MLP multiplies what its activation gives with a second projection."""
    glu_limit: float | None = None
    """The first projection is clamped to it from above, the second one from both sides; None: neither."""
    glu_offset: float = 0.0
    """Added to the second projection."""
    rotary_percent: float = 1.0
    """The part of a head, from its first element on, that rotates."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    """Whether each head has a logit of its own in the softmax of attention, which takes weight and gives no value."""
    encoder_layers: int = 0
    """Of an encoder that the decoder attends to; 0 where there is one stack."""
    final_norm: bool = True
    post_norm: bool = False
    """Whether what a norm gives is carried on past the next sublayer, as in the original BERT, and not what it was given."""
    token_types: int = 0
    """Kinds of segments that have an embedding."""
    binary_head: bool = False
    """Whether a pooler and a head say if two segments follow each other."""
    head_bias: bool = False
    """Whether a head that may lack it has a bias per word."""
    head_activation: str = ""
    """Of the transform before a masked-language-model head, in the words of `activation`; empty without one."""
    relative_buckets: int = 0
    """Distances that relative positions tell apart, the largest of which is relative_distance."""
    relative_distance: int = 0
    scaled_attention: bool = True
    """Whether attention scores are divided by the square root of head_dim."""
    zero_centered_norm: bool = False
    """Whether a norm multiplies with its weight + 1."""
    embedding_scale: float | None = None
    """A factor on what the embedding gives."""
    kv_rank: int = 0
    """Width of the latent vector that keys and values are made of; 0 without latent attention."""
    q_rank: int = 0
    """Width of the one that queries are made of; 0 where they are made directly."""
    rope_dim: int = 0
    """With latent attention, the part of head_dim that rotates: its last elements, in pairs, one for all heads of keys."""
    v_dim: int = 0
    """Elements of a head's values, where they are not head_dim."""
    mtp_layers: int = 0
    """Layers after the last that predict further tokens."""
    sliding_window: int | None = None
    """Number of positions that a token attends to, itself included; None for all."""
    windowed_layers: tuple[int, ...] | None = None
    """Layers with the sliding window, if not all of them have it."""
    experts: int = 0
    """Routed experts of each mixture-of-experts layer; 0 for a dense model."""
    experts_per_token: int = 0
    moe_ffn: int = 0
    """Width of one routed expert."""
    moe_layers: tuple[int, ...] | None = None
    """Layers with experts, if not all of them have any."""
    shared_ffn: int = 0
    """Width of the expert that every token passes; 0 without one."""
    shared_gate: bool = False
    """Whether a gate scales what the shared expert gives."""
    router_score: str = "softmax"
    """What turns router logits into weights: `softmax` or `sigmoid`."""
    renormalize: bool = True
    """Whether the weights of the experts that were chosen are made to sum up to 1."""
    router_scale: float | None = None
    """A factor on those weights."""
    router_groups: int | None = None
    router_group_topk: int | None = None
    """Experts are chosen from the best router_group_topk of router_groups groups; None without groups."""
    router_bias: bool = False
    """Whether a bias per expert, in fp32, takes part in the choice (and not in the weights)."""
    dtype: str = "bfloat16"
    """What most of the weights are stored in: read off the tensors."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    hf: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The model's own config.json, word for word, where it is known."""

    def __post_init__(self) -> None:
        """Raises CorruptCheckpoint for values that no model has."""
        for name in ("layers", *SIZES):
            value, least = getattr(self, name), 0 if name in MAY_BE_ZERO else 1
            if type(value) is not int or value < least:
                raise CorruptCheckpoint(f"the model's {name} should be a positive number, found {value!r}")
        require_possible(vars(self))
        for name in ("norm_epsilon", "rope_theta", "rotary_percent"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not isfinite(value):
                raise CorruptCheckpoint(f"the model's {name} should be a number, found {value!r}")
        if self.experts and not (self.moe_ffn and 0 < self.experts_per_token <= self.experts):
            what = f"{self.experts_per_token} of {self.experts} experts of width {self.moe_ffn}"
            raise CorruptCheckpoint(f"the model can't have {what} for each token")

        if self.kv_rank and not (0 < self.rope_dim < self.head_dim and self.v_dim):
            what = f"heads of {self.head_dim}, {self.rope_dim} of them rotating, and values of {self.v_dim}"
            raise CorruptCheckpoint(f"the model's latent attention can't have {what}")

    def has(self, features: str, layer: int) -> bool:
        """Whether a layer has all of these features (`moe shared_ffn`): fields, or those derived below."""
        is_moe = self.experts > 0 and (self.moe_layers is None or layer in self.moe_layers)
        derived = {"moe": is_moe, "dense": not is_moe, "untied": not self.tie_embeddings}
        derived |= {"mla": self.kv_rank > 0, "q_latent": self.q_rank > 0, "q_direct": not self.q_rank}
        derived |= {"norm_bias": self.normalization == "LayerNorm", "learned": self.positions == "learned"}
        derived |= {"relative": self.positions == "relative", "plain": not self.gated, "pre_norm": not self.post_norm}
        derived |= {"first_layer": layer == 0, "later_layer": layer > 0}
        return all(derived[name] if name in derived else bool(getattr(self, name)) for name in features.split())

    def sizes(self) -> dict[str, int]:
        """The sizes that shapes are written in."""
        derived = {"nope_dim": self.head_dim - self.rope_dim, "kv_and_rope": self.kv_rank + self.rope_dim}
        return {name: getattr(self, name) for name in SIZES} | derived


SIZES = (
    *("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions", "experts", "moe_ffn", "shared_ffn"),
    *("encoder_layers", "token_types", "relative_buckets", "kv_rank", "q_rank", "rope_dim", "v_dim"),
)
MAY_BE_ZERO = (
    *("experts", "moe_ffn", "shared_ffn", "encoder_layers", "token_types", "relative_buckets"),
    *("kv_rank", "q_rank", "rope_dim", "v_dim"),
)
STRUCTURE = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "tie_embeddings",
    "qkv_bias",
    "o_bias",
    "mlp_bias",
    "qk_norm",
    "sinks",
    "experts",
    "moe_layers",
    "shared_gate",
    "router_bias",
    "encoder_layers",
    "final_norm",
    "token_types",
    "binary_head",
    "relative_buckets",
    "kv_rank",
    "q_rank",
    "rope_dim",
    "v_dim",
)
"""What decides names and shapes: two descriptions of one checkpoint have to agree on these."""


def config_differences(left: ModelConfig, right: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(field, left value, right value) wherever two configurations mean different models."""
    return [
        (item.name, getattr(left, item.name), getattr(right, item.name))
        for item in fields(ModelConfig)
        if item.compare and getattr(left, item.name) != getattr(right, item.name)
    ]
