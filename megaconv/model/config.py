"""The configuration of a model, grouped by subject: everything that any target format has to write.

Every value has a dotted name (`attention.heads`, `layers.window`). Loaders collect the values that they find under
these names, and families list the names that their config.json can represent. Error messages name the fields that a
target can't represent. `fields.py` translates between dotted names and objects.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from typing import Any, NamedTuple

from megaconv.errors import CorruptCheckpoint
from megaconv.model.beside import Whole
from megaconv.model.mixers import (
    BlockIndexer,
    CompressedAttention,
    Indexer,
    LatentAttention,
    LinearAttention,
    Mamba,
    ShortConvolution,
)
from megaconv.model.own_names import OwnNames
from megaconv.model.subjects import (
    MLP,
    Attention,
    Encoder,
    Experts,
    Factors,
    Head,
    HyperConnections,
    LayerInputs,
    LayerKind,
    Norm,
    Positions,
    Retrieval,
    Retriever,
    Streams,
    Temperature,
    retrieving_layers,
)


@dataclass(frozen=True)
class ModelConfig:
    """One model. Its sizes are those of the whole model, before sharding and padding."""

    family: str
    layers: tuple[LayerKind, ...]
    """Layers of the decoder, or of the only stack, in order."""
    hidden: int
    vocab: int
    max_positions: int
    attention: Attention
    mlp: MLP
    norm: Norm = field(default_factory=Norm)
    positions: Positions = field(default_factory=Positions)
    temperature: Temperature = field(default_factory=Temperature)
    latent: LatentAttention = field(default_factory=LatentAttention)
    indexer: Indexer = field(default_factory=Indexer)
    block_indexer: BlockIndexer = field(default_factory=BlockIndexer)
    compressed: CompressedAttention = field(default_factory=CompressedAttention)
    linear: LinearAttention = field(default_factory=LinearAttention)
    mamba: Mamba = field(default_factory=Mamba)
    convolution: ShortConvolution = field(default_factory=ShortConvolution)
    factors: Factors = field(default_factory=Factors)
    experts: Experts = field(default_factory=Experts)
    layer_inputs: LayerInputs = field(default_factory=LayerInputs)
    streams: Streams = field(default_factory=Streams)
    hyper: HyperConnections = field(default_factory=HyperConnections)
    encoder: Encoder = field(default_factory=Encoder)
    retrieval: Retrieval = field(default_factory=Retrieval)
    head: Head = field(default_factory=Head)
    tie_embeddings: bool = False
    embedding_scale: float | None = None
    """A factor on the embedding's output."""
    residual_scale: float | None = None
    """A factor on the output of each attention and each MLP, before it is added; None for 1."""
    residual_block: int = 0
    """Layers of a block of attention residuals (Kimi K3, arXiv 2607.24653): the input of each sublayer is a weighted sum
    of the outputs of all earlier blocks and of the own block's sum so far. 0: the plain sum of all earlier outputs."""
    layer_scale: bool = False
    """True if each layer has a stored number that scales its output."""
    parallel_residual: bool = False
    """True if attention and the MLP of a layer work on the same input, each after its own norm or both after one
    (norm.shared), and both are added to it."""
    retriever: Retriever = field(default_factory=Retriever)
    token_types: int = 0
    """Number of segment types that have an embedding."""
    mtp_layers: int = 0
    """Number of multi-token prediction (MTP) layers, which follow the last layer."""
    dtype: str = "bfloat16"
    """Dtype of most of the weights, read from the tensors."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    hf: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The model's own config.json, unchanged; None if it is not known."""
    whole: Whole | None = field(default=None, compare=False, repr=False)
    """The multimodal model that contains this model and is converted with it; None for a plain language model."""
    own_names: OwnNames | None = field(default=None, compare=False, repr=False)
    """The tensors of a model that no family describes. All sizes above then have no meaning."""
    _features: dict[int, frozenset[str]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """Raise CorruptCheckpoint for values that no model has."""
        for name, size in SIZES.items():
            value = size.of(self)
            if type(value) is not int or value < size.least:
                raise CorruptCheckpoint(
                    f"the model's {name} should be a positive number, found {value!r}"
                )
        if not self.layers:
            raise CorruptCheckpoint("the model's layers should be a positive number, found 0")
        for name in ("norm.epsilon", "positions.theta", "positions.rotary_percent"):
            value = value_of(self, name)
            if type(value) not in (int, float) or not isfinite(value):
                raise CorruptCheckpoint(f"the model's {name} should be a number, found {value!r}")
        experts, latent = self.experts, self.latent
        if experts.count and not (experts.ffn and 0 < experts.per_token <= experts.count):
            what = f"{experts.per_token} of {experts.count} experts of width {experts.ffn}"
            raise CorruptCheckpoint(f"the model can't have {what} for each token")
        if latent.kv_rank and not (0 < latent.rope_dim < self.attention.head_dim and latent.v_dim):
            what = f"heads of {self.attention.head_dim}, {latent.rope_dim} of them rotating, and values of {latent.v_dim}"
            raise CorruptCheckpoint(f"the model's latent attention can't have {what}")
        indexer = self.indexer
        if indexer.heads and not (
            latent.q_rank and indexer.head_dim >= latent.rope_dim > 0 and indexer.topk > 0
        ):
            what = (
                f"{indexer.heads} heads of {indexer.head_dim} that choose {indexer.topk} positions"
            )
            raise CorruptCheckpoint(
                f"the model's indexer can't have {what} where {latent.rope_dim} elements rotate"
            )
        self._check_compressed()
        if self.predicted < 1:
            raise CorruptCheckpoint(
                f"the model can't have {self.vocab} tokens, {self.head.unpredicted} of them without a row of the head"
            )
        self._check_linear()
        self._check_mamba()
        self._check_convolution()
        self._check_retrieval()

    def _check_compressed(self) -> None:
        found, heads = self.compressed, self.attention.heads
        if not any(kind.mixer == "compressed" for kind in self.layers):
            return
        widths = (found.q_rank, found.out_groups, found.out_rank)
        if not all(widths) or heads % found.out_groups:
            what = f"{heads} heads in {found.out_groups} groups of {found.out_rank}, and queries of rank {found.q_rank}"
            raise CorruptCheckpoint(f"the model's compressed attention can't have {what}")
        needed = {
            "none": (),
            "all": (found.long,),
            "selected": (found.short, found.index_heads, found.index_dim, found.topk),
        }
        for entries in {kind.entries for kind in self.layers}:
            if not all(needed[entries]):
                what = f"{entries} entries with {found}"
                raise CorruptCheckpoint(f"the model's compressed attention can't have {what}")

    def _check_linear(self) -> None:
        linear = self.linear
        sizes = (
            linear.key_heads,
            linear.value_heads,
            linear.key_dim,
            linear.value_dim,
            linear.conv,
        )
        if any(kind.mixer in ("linear", "kda") for kind in self.layers) and (
            not all(sizes) or linear.value_heads % linear.key_heads
        ):
            what = f"{linear.key_heads} key heads of {linear.key_dim}, {linear.value_heads} value heads of {linear.value_dim}"
            raise CorruptCheckpoint(
                f"the model's linear attention can't have {what} and a convolution over {linear.conv} positions"
            )

    def _check_mamba(self) -> None:
        mamba = self.mamba
        sizes = (mamba.heads, mamba.head_dim, mamba.groups, mamba.state)
        if any(kind.mixer in ("mamba", "side_by_side") for kind in self.layers) and (
            not all(sizes) or mamba.heads % mamba.groups
        ):
            what = f"{mamba.heads} heads of {mamba.head_dim} in {mamba.groups} groups, and a state of {mamba.state}"
            raise CorruptCheckpoint(f"the model's Mamba layers can't have {what}")

    def _check_convolution(self) -> None:
        if any(kind.mixer == "convolution" for kind in self.layers) and not self.convolution.width:
            raise CorruptCheckpoint(
                "the model's short convolutions should be over a positive number of positions, found 0"
            )

    def _check_retrieval(self) -> None:
        found = self.retrieval
        if not found.layers:
            return
        if not self.retrieving:
            raise CorruptCheckpoint(
                f"the model can't attend to retrieved text with {self.layer_count} layers: layer 6 is the first that does"
            )
        if not (found.chunk and found.neighbors and found.chunks):
            what = f"{found.neighbors} neighbors of {found.chunks} chunks of {found.chunk} tokens"
            raise CorruptCheckpoint(f"the model can't attend to {what} (Retro)")

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def retrieving(self) -> range:
        """Numbers of the layers that attend to retrieved text; empty in models without retrieval."""
        return retrieving_layers(self.layer_count) if self.retrieval.layers else range(0)

    @property
    def predicted(self) -> int:
        """Tokens that the head has rows for."""
        return self.vocab - self.head.unpredicted

    def tokens_of(self, canonical: str) -> int:
        """Rows of a canonical tensor that has one for each token, such as the embedding."""
        return self.predicted if canonical.startswith("head.") else self.vocab

    @property
    def window(self) -> int | None:
        """Attention window of the layers that have one; None if no layer has one."""
        return next((kind.window for kind in self.layers if kind.window is not None), None)

    def layers_with(self, features: str) -> tuple[int, ...]:
        """Numbers of the layers that have all of these features."""
        return tuple(layer for layer in range(self.layer_count) if self.has(features, layer))

    def has(self, features: str, layer: int = 0) -> bool:
        """True if a layer has all of these features, such as `moe !shared_ffn`.

        features: names of FEATURES, separated by spaces. The prefix `!` means that the layer must not have the feature.
        layer: a number after the last layer stands for the last layer's kind. Raises KeyError for an unknown feature.
        """
        found = self._features.get(layer)
        if found is None:
            kind = self.layers[min(layer, self.layer_count - 1)]
            found = frozenset(name for name, holds in FEATURES.items() if holds(self, kind, layer))
            self._features[layer] = found
        wanted, unwanted = _parsed(features)
        return wanted <= found and unwanted.isdisjoint(found)

    def sizes(self) -> dict[str, int]:
        """The sizes that shapes are written in, by name. Layers may have their own of some (own_sizes)."""
        rope_dim = self.latent.rope_dim
        derived = {
            "nope_dim": self.attention.head_dim - rope_dim,
            "kv_and_rope": self.latent.kv_rank + rope_dim,
            "expert_hidden": self.experts.latent or self.hidden,
            "attn_v_dim": self.attention.v_dim or self.attention.head_dim,
            "position_rows": self.max_positions + self.positions.offset,
            "conv_channels": self.hidden,
            "stored_decays": self.linear.stored_decays or self.linear.value_heads,
            "out_group_width": self.attention.heads
            * self.attention.head_dim
            // (self.compressed.out_groups or 1),
            "hyper_weights": (2 + self.hyper.streams) * self.hyper.streams,
            "predicted": self.predicted,
        }
        tower = {} if self.whole is None else self.whole.sizes
        return {name: size.of(self) for name, size in SIZES.items()} | derived | dict(tower)

    def own_sizes(self, layer: int) -> dict[str, int]:
        """The sizes that one layer has instead of the model's; empty in most models."""
        kind = self.layers[layer]
        own = {name: getattr(kind, name) for name in OF_ONE_LAYER}
        return {name: size for name, size in own.items() if size is not None}


class Size(NamedTuple):
    """A size that shapes are written in: the field that holds it, and its smallest valid value."""

    field: str
    least: int = 0

    def of(self, config: ModelConfig) -> Any:
        return value_of(config, self.field)


OF_ONE_LAYER = ("heads", "kv_heads", "head_dim", "ffn")
"""The sizes that a layer may have of its own."""
SIZES: Mapping[str, Size] = {
    "layers": Size("layers.count", 1),
    "hidden": Size("hidden", 1),
    "heads": Size("attention.heads", 1),
    "kv_heads": Size("attention.kv_heads", 1),
    "head_dim": Size("attention.head_dim", 1),
    "ffn": Size("mlp.ffn", 1),
    "vocab": Size("vocab", 1),
    "max_positions": Size("max_positions", 1),
    "experts": Size("experts.count", 0),
    "moe_ffn": Size("experts.ffn", 0),
    "vision_ffn": Size("experts.vision_ffn", 0),
    "shared_ffn": Size("experts.shared_ffn", 0),
    "expert_latent": Size("experts.latent", 0),
    "encoder_layers": Size("encoder.layers"),
    "retriever_layers": Size("retrieval.layers"),
    "token_types": Size("token_types"),
    "classes": Size("head.classes"),
    "unpredicted": Size("head.unpredicted"),
    "projection": Size("retriever.projection"),
    "relative_buckets": Size("positions.buckets"),
    "kv_rank": Size("latent.kv_rank"),
    "q_rank": Size("latent.q_rank"),
    "norm_gate": Size("norm.gate_rank"),
    "rope_dim": Size("latent.rope_dim"),
    "v_dim": Size("latent.v_dim"),
    "index_heads": Size("indexer.heads"),
    "index_dim": Size("indexer.head_dim"),
    "linear_key_heads": Size("linear.key_heads"),
    "linear_value_heads": Size("linear.value_heads"),
    "linear_key_dim": Size("linear.key_dim"),
    "linear_value_dim": Size("linear.value_dim"),
    "linear_conv": Size("linear.conv"),
    "mamba_heads": Size("mamba.heads"),
    "mamba_head_dim": Size("mamba.head_dim"),
    "mamba_groups": Size("mamba.groups"),
    "mamba_state": Size("mamba.state"),
    "conv_width": Size("convolution.width"),
    "layer_input_width": Size("layer_inputs.width"),
    "layer_input_vocab": Size("layer_inputs.vocab"),
    "block_heads": Size("block_indexer.heads"),
    "block_dim": Size("block_indexer.head_dim"),
    "streams": Size("streams.count"),
    "laurel_rank": Size("streams.laurel_rank"),
    "hyper_streams": Size("hyper.streams"),
    "compressed_q_rank": Size("compressed.q_rank"),
    "out_groups": Size("compressed.out_groups"),
    "out_rank": Size("compressed.out_rank"),
    "short_entry": Size("compressed.short"),
    "long_entry": Size("compressed.long"),
    "entry_heads": Size("compressed.index_heads"),
    "entry_dim": Size("compressed.index_dim"),
    "experts_per_token": Size("experts.per_token"),
}
"""Name of a size in shapes -> the size."""


def _without_words(config: ModelConfig) -> bool:
    """True if the model has a head for a task (classification, multiple choice, retrieval) instead of a language-model
    head."""
    of_task = config.head.classes or config.head.choices or config.retriever.towers
    return bool(of_task) and not config.head.activation


Holds = Callable[[ModelConfig, LayerKind, int], bool]
FEATURES: Mapping[str, Holds] = {
    # Features of the whole model.
    "untied": lambda config, kind, layer: not config.tie_embeddings and not _without_words(config),
    "rope": lambda config, kind, layer: config.positions.kind == "rope",
    "interleaved": lambda config, kind, layer: config.positions.interleaved,
    "skips_rope": lambda config, kind, layer: not all(each.rotates for each in config.layers),
    "learned": lambda config, kind, layer: config.positions.kind == "learned",
    "relative": lambda config, kind, layer: config.positions.kind == "relative",
    "norm_bias": lambda config, kind, layer: (
        config.norm.kind == "LayerNorm" and config.norm.bias and config.norm.weight
    ),
    "norm_weight": lambda config, kind, layer: config.norm.weight,
    "shared_norm": lambda config, kind, layer: config.norm.shared and config.parallel_residual,
    "inner_norm": lambda config, kind, layer: config.norm.inner,
    "expert_output_norm": lambda config, kind, layer: config.norm.after_experts,
    "embedding_norm": lambda config, kind, layer: config.norm.embedding,
    "parallel": lambda config, kind, layer: config.parallel_residual,
    "zero_centered": lambda config, kind, layer: config.norm.zero_centered,
    "pre_norm": lambda config, kind, layer: config.norm.place == "before",
    "post_norm": lambda config, kind, layer: config.norm.place == "after_sum",
    "output_norm": lambda config, kind, layer: config.norm.place == "after",
    "sandwich_norm": lambda config, kind, layer: config.norm.place == "both",
    "norm_by_mixer": lambda config, kind, layer: config.norm.place == "by_mixer",
    "final_norm": lambda config, kind, layer: config.norm.final,
    "qkv_bias": lambda config, kind, layer: config.attention.qkv_bias,
    "o_bias": lambda config, kind, layer: config.attention.o_bias,
    "qk_norm": lambda config, kind, layer: config.attention.qk_norm,
    "wide_qk_norm": lambda config, kind, layer: (
        config.attention.qk_norm and config.attention.qk_norm_width == "all"
    ),
    "qk_norm_bias": lambda config, kind, layer: (
        config.attention.qk_norm and config.attention.qk_norm_bias
    ),
    "own_qk_norm": lambda config, kind, layer: (
        config.attention.qk_norm and config.attention.qk_norm_width == "own"
    ),
    "qk_l2_norm": lambda config, kind, layer: config.attention.qk_l2_norm,
    "qkv_alone": lambda config, kind, layer: (
        config.attention.qkv_bias and not config.attention.o_bias
    ),
    "scaled_scores": lambda config, kind, layer: config.attention.scale is not None,
    "capped_scores": lambda config, kind, layer: config.attention.score_cap is not None,
    "block_indexer": lambda config, kind, layer: any(each.indexed for each in config.layers),
    "head_gate": lambda config, kind, layer: config.attention.head_gate,
    "limits": lambda config, kind, layer: any(
        each.limit is not None or each.shared_limit is not None for each in config.layers
    ),
    "two_rotations": lambda config, kind, layer: config.positions.local_rotary_percent is not None,
    "normalized_head": lambda config, kind, layer: config.head.normalized,
    "shorter_head": lambda config, kind, layer: config.head.unpredicted > 0,
    "partly_scaled": lambda config, kind, layer: (
        config.positions.scaling is not None
        and not all(each.scales_positions for each in config.layers)
    ),
    "capped_logits": lambda config, kind, layer: config.head.logit_cap is not None,
    "scaled_embedding": lambda config, kind, layer: config.embedding_scale is not None,
    "tempered": lambda config, kind, layer: config.temperature.scale != 0,
    "chunks": lambda config, kind, layer: any(each.chunk is not None for each in config.layers),
    "two_ropes": lambda config, kind, layer: config.positions.local_theta is not None,
    "sinks": lambda config, kind, layer: config.attention.sinks,
    "output_gate": lambda config, kind, layer: config.attention.output_gate,
    "linear_layers": lambda config, kind, layer: any(
        each.mixer == "linear" for each in config.layers
    ),
    "kda_layers": lambda config, kind, layer: any(each.mixer == "kda" for each in config.layers),
    "full_rank_out_gate": lambda config, kind, layer: config.linear.full_rank_out_gate,
    "compressed_layers": lambda config, kind, layer: any(
        each.mixer == "compressed" for each in config.layers
    ),
    "hyper_connections": lambda config, kind, layer: config.hyper.streams > 0,
    "hash_layers": lambda config, kind, layer: any(each.hashed for each in config.layers),
    "mamba_layers": lambda config, kind, layer: any(
        each.mixer in ("mamba", "side_by_side") for each in config.layers
    ),
    "side_by_side": lambda config, kind, layer: any(
        each.mixer == "side_by_side" for each in config.layers
    ),
    "mamba_norm": lambda config, kind, layer: config.mamba.norm != "none",
    "convolution_layers": lambda config, kind, layer: any(
        each.mixer == "convolution" for each in config.layers
    ),
    "hybrid_stack": lambda config, kind, layer: any(
        each.mixer in ("mamba", "none") or each.mlp == "none" for each in config.layers
    ),
    "only_mamba": lambda config, kind, layer: all(
        each.mixer == "mamba" and each.mlp == "none" for each in config.layers
    ),
    "mlp_bias": lambda config, kind, layer: config.mlp.bias,
    "gated": lambda config, kind, layer: config.mlp.gated,
    "plain": lambda config, kind, layer: not config.mlp.gated,
    "silu": lambda config, kind, layer: config.mlp.activation == "silu",
    "gelu_tanh": lambda config, kind, layer: config.mlp.activation == "gelu_tanh",
    "quick_gelu": lambda config, kind, layer: config.mlp.activation == "quick_gelu",
    "relu2": lambda config, kind, layer: config.mlp.activation == "relu2",
    "clamped": lambda config, kind, layer: config.mlp.clamp is not None or bool(config.mlp.offset),
    "mla": lambda config, kind, layer: config.latent.kv_rank > 0,
    "q_latent": lambda config, kind, layer: config.latent.q_rank > 0,
    "q_direct": lambda config, kind, layer: config.latent.q_rank == 0,
    "indexer": lambda config, kind, layer: config.indexer.heads > 0,
    "interleaved_indexer": lambda config, kind, layer: config.indexer.interleaved,
    "mixture": lambda config, kind, layer: config.experts.count > 0,
    "sigmoid_router": lambda config, kind, layer: config.experts.score == "sigmoid",
    "shared_ffn": lambda config, kind, layer: config.experts.shared_ffn > 0,
    "vision_experts": lambda config, kind, layer: config.experts.vision_ffn > 0,
    "shared_gate": lambda config, kind, layer: config.experts.shared_gate,
    "router_bias": lambda config, kind, layer: config.experts.router_bias,
    "expert_norms": lambda config, kind, layer: config.experts.own_norms,
    "layer_inputs": lambda config, kind, layer: config.layer_inputs.width > 0,
    "streams": lambda config, kind, layer: config.streams.count > 0,
    "sparse_mlp": lambda config, kind, layer: any(each.sparsity for each in config.layers),
    "layer_scale": lambda config, kind, layer: config.layer_scale,
    "attention_residuals": lambda config, kind, layer: config.residual_block > 0,
    "situ": lambda config, kind, layer: config.mlp.activation == "situ",
    "layers_differ": lambda config, kind, layer: any(
        config.own_sizes(each) for each in range(config.layer_count)
    ),
    "shared_kv": lambda config, kind, layer: any(each.shares_kv for each in config.layers),
    "keys_as_values": lambda config, kind, layer: any(
        each.keys_as_values for each in config.layers
    ),
    "v_norm": lambda config, kind, layer: config.attention.v_norm,
    "probs_on_input": lambda config, kind, layer: config.experts.probs_on_input,
    "expert_latent": lambda config, kind, layer: config.experts.latent > 0,
    "expert_latent_norm": lambda config, kind, layer: config.experts.latent_norm,
    "encoder": lambda config, kind, layer: config.encoder.layers > 0,
    "retrieval": lambda config, kind, layer: config.retrieval.layers > 0,
    "retrieval_from_6": lambda config, kind, layer: config.retrieving[:1] == range(5, 6),
    "retrieval_from_9": lambda config, kind, layer: config.retrieving[:1] == range(8, 9),
    "token_types": lambda config, kind, layer: config.token_types > 0,
    "binary_head": lambda config, kind, layer: config.head.binary,
    "classification_head": lambda config, kind, layer: config.head.classes > 0,
    "multichoice_head": lambda config, kind, layer: config.head.choices,
    "pooler": lambda config, kind, layer: (
        config.head.binary or bool(config.head.classes or config.head.choices)
    ),
    "both_ways": lambda config, kind, layer: bool(
        config.head.activation
        or config.head.classes
        or config.head.choices
        or config.retriever.towers
    ),
    "retriever": lambda config, kind, layer: bool(config.retriever.towers),
    "separate_towers": lambda config, kind, layer: config.retriever.towers == "separate",
    "shared_tower": lambda config, kind, layer: config.retriever.towers == "shared",
    "projection": lambda config, kind, layer: config.retriever.projection > 0,
    "tower_pooler": lambda config, kind, layer: config.retriever.pooler,
    "head_bias": lambda config, kind, layer: config.head.bias,
    "transform": lambda config, kind, layer: bool(config.head.activation),
    "windows": lambda config, kind, layer: config.window is not None,
    "tower": lambda config, kind, layer: config.whole is not None and bool(config.whole.tower),
    "only_windows": lambda config, kind, layer: all(
        each.window is not None for each in config.layers
    ),
    # Features of one layer.
    "attention": lambda config, kind, layer: kind.mixer in ("attention", "side_by_side"),
    "linear": lambda config, kind, layer: kind.mixer == "linear",
    "kda": lambda config, kind, layer: kind.mixer == "kda",
    "compressed": lambda config, kind, layer: kind.mixer == "compressed",
    "selected_entries": lambda config, kind, layer: (
        kind.mixer == "compressed" and kind.entries == "selected"
    ),
    "all_entries": lambda config, kind, layer: kind.mixer == "compressed" and kind.entries == "all",
    "hashed": lambda config, kind, layer: kind.hashed,
    "mamba": lambda config, kind, layer: kind.mixer in ("mamba", "side_by_side"),
    "convolution": lambda config, kind, layer: kind.mixer == "convolution",
    "moe": lambda config, kind, layer: config.experts.count > 0 and kind.mlp == "experts",
    "dense": lambda config, kind, layer: (
        kind.mlp != "none" and not (config.experts.count and kind.mlp == "experts")
    ),
    "indexed": lambda config, kind, layer: kind.indexed,
    "own_kv": lambda config, kind, layer: not kind.shares_kv,
    "own_values": lambda config, kind, layer: not kind.shares_kv and not kind.keys_as_values,
    "retrieves": lambda config, kind, layer: layer in config.retrieving,
    "window": lambda config, kind, layer: kind.window is not None,
    "sinks_here": lambda config, kind, layer: (
        config.attention.sinks
        and (kind.window is not None or not config.attention.sinks_in_windows)
    ),
    "o_bias_here": lambda config, kind, layer: (
        config.attention.o_bias
        and (not config.attention.o_bias_last or layer == config.layer_count - 1)
    ),
    "first_layer": lambda config, kind, layer: layer == 0,
    "later_layer": lambda config, kind, layer: layer > 0,
}
"""The features that a table's row or a family may depend on. Each function takes (config, kind, layer)."""


@cache
def _parsed(features: str) -> tuple[frozenset[str], frozenset[str]]:
    """(wanted, unwanted) features of a text such as `moe !shared_ffn`."""
    names = features.split()
    for name in names:
        FEATURES[name.removeprefix("!")]
    unwanted = frozenset(name[1:] for name in names if name.startswith("!"))
    return frozenset(name for name in names if not name.startswith("!")), unwanted


def value_of(config: ModelConfig, name: str) -> Any:
    """The value of a dotted field. A field such as `layers.window` is one value if all layers agree, else a tuple with
    one for each."""
    subject, _, inner = name.rpartition(".")
    if subject == "layers":
        if inner == "count":
            return config.layer_count
        values = tuple(getattr(kind, inner) for kind in config.layers)
        return values[0] if len(set(values)) == 1 else values
    return getattr(getattr(config, subject), inner) if subject else getattr(config, inner)
