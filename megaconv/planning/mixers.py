"""The cost of each kind of mixer: elements that it keeps, operations, and widths that tensor ranks exchange."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megaconv.model.config import ModelConfig
from megaconv.model.subjects import LayerKind

FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class MixerCost:
    """The cost of one kind of mixer. Sizes are those of the whole model."""

    needs_norm: bool = False
    """True if the layer norms the mixer's input; False if the mixer contains its norm."""
    attends: bool = False
    """True if tokens attend to the keys of all earlier tokens, which context-parallel ranks exchange."""
    elements: Callable[[ModelConfig, LayerKind], float]
    """The elements in the model's dtype that a token leaves in the mixer for the backward pass, without its input."""
    wide_elements: Callable[[ModelConfig, LayerKind], float] = lambda config, kind: 0.0
    """The elements that it leaves in float32, whatever the model's dtype is."""
    operations: Callable[[ModelConfig, int], float]
    """(model, tokens of a sequence) -> operations per token, forward and backward, without products with weights."""
    has_indexer: bool = False
    """True if an indexer chooses keys. All ranks need its keys, and tensor ranks its choices."""
    channels_of_states: Callable[[ModelConfig, int], int] = lambda config, ranks: 0
    """The channels of a token that context ranks exchange, so that each rank computes some channels of all tokens.

    ranks: the tensor ranks times the context ranks. Each needs a head of keys, so that a few heads are sent several times.
    """
    normed_together: Callable[[ModelConfig, LayerKind], int] = lambda config, kind: 0
    """The norms whose sums of squares tensor ranks add up, because a norm covers the heads of all ranks."""
    input_width: Callable[[ModelConfig], int]
    """The width of all inputs of column-sharded matrices, which tensor ranks gather or sum."""
    direct_width: Callable[[ModelConfig], int] | None = None
    """The part of input_width that is the layer's own input, and not what another matrix makes of it. None: all of it."""
    output_width: Callable[[ModelConfig], int] = lambda config: config.hidden
    """The width of all outputs of row-sharded matrices, which tensor ranks sum."""
    shared_width: Callable[[ModelConfig], int] = lambda _: 0
    """The width of activations that each rank computes from its own tokens, and that the heads of all ranks use."""

    def kept(self, config: ModelConfig, kind: LayerKind, itemsize: int) -> float:
        """Return all elements that a token leaves, counted in the model's dtype. itemsize: bytes of one of these."""
        wide = self.wide_elements(config, kind) * FLOAT32 / itemsize
        return self.elements(config, kind) + wide

    @property
    def own_input_width(self) -> Callable[[ModelConfig], int]:
        """direct_width, or input_width if all of it is the layer's own input."""
        return self.direct_width or self.input_width


def in_layer(config: ModelConfig, kind: LayerKind) -> ModelConfig:
    """Return the model with the sizes of one layer, if the layer has sizes of its own."""
    attention = {name: getattr(kind, name) for name in ("heads", "kv_heads", "head_dim")}
    own = {name: size for name, size in attention.items() if size is not None}
    if not own and kind.ffn is None:
        return config
    ffn = config.mlp.ffn if kind.ffn is None else kind.ffn
    return replace(
        config,
        attention=replace(config.attention, **own),
        mlp=replace(config.mlp, ffn=ffn),
    )


def _hidden(config: ModelConfig) -> int:
    return config.hidden


def _of_scores(config: ModelConfig, tokens: int) -> float:
    """Return the operations of scores and weighted sums: 12 h s. They are not halved for the mask."""
    attention = config.attention
    passes = 2 if attention.differential else 1
    return 6.0 * passes * attention.heads * (attention.head_dim + attention.value_dim) * tokens


def _attention_elements(config: ModelConfig, kind: LayerKind) -> float:
    """Return the fused product, the inputs of attention (keys again if they rotate, scaled values) and its output.

    A norm of queries keeps them a second time, because they are not contiguous in the fused product. A limit keeps them, and
    the values after it. A gate is kept as
    its projection and as the factor that it gives, and the output is kept before and after it. Shared keys and values are
    those of another layer. Heads in pairs keep the values of first and of second heads, an output for each, both outputs
    joined, and their difference.
    """
    attention = in_layer(config, kind).attention
    q, k = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    v, output = attention.kv_heads * attention.value_dim, attention.heads * attention.value_dim
    if kind.shares_kv:
        return 3 * q
    rotated = k if kind.rotates and config.positions.kind == "rope" else 0
    scaled = v if attention.value_scale is not None else 0
    normed = q if attention.qk_norm and attention.qk_norm_width == "head" else 0
    clipped = q + v if attention.clip is not None else 0
    plain = (q + k + v) + q + normed + clipped + rotated + scaled + output
    if attention.output_gate:
        return plain + 2 * output + output
    if attention.head_gate:
        return plain + 2 * attention.heads + output
    if attention.differential:
        return plain + 2 * v + 5 * output
    return plain


def _wide_attention_elements(config: ModelConfig, kind: LayerKind) -> float:
    """Return what norms of q and k keep in float32, except norms of single heads, whose weights all heads share.

    A norm keeps its input, and its output before the weights if it has weights.
    """
    attention = in_layer(config, kind).attention
    keys = 0 if kind.shares_kv else attention.kv_heads
    normed = (attention.heads + keys) * attention.head_dim
    if attention.qk_norm and attention.qk_norm_width != "head":
        return 2 * normed
    return normed if attention.qk_l2_norm and kind.rotates else 0


def _norms_over_ranks(config: ModelConfig, kind: LayerKind) -> int:
    attention = config.attention
    if not attention.qk_norm or attention.qk_norm_width != "all":
        return 0
    return 1 if kind.shares_kv else 2


ATTENTION = MixerCost(
    attends=True,
    elements=_attention_elements,
    wide_elements=_wide_attention_elements,
    normed_together=_norms_over_ranks,
    operations=_of_scores,
    input_width=_hidden,
)


def _latent_elements(config: ModelConfig, _: LayerKind) -> float:
    """Return the latent vectors and what their norms give, queries, keys, values, and attention's output.

    Values narrower than keys are padded, so attention keeps wide values and a wide output, and the next matrix keeps the narrow
    output. Other values are kept in one product with the part of keys that doesn't rotate.
    """
    attention, latent = config.attention, config.latent
    wide, values = attention.head_dim, latent.v_dim
    latents = 2 * (latent.q_rank + latent.kv_rank)
    padded = 2 * wide + values
    product = (wide - latent.rope_dim) + values
    of_values = padded if values < wide else product + values
    return attention.heads * (2 * wide + of_values) + latents


def _latent_input_width(config: ModelConfig) -> int:
    """Return the widths of the inputs of both matrices that project up."""
    return (config.latent.q_rank or config.hidden) + config.latent.kv_rank


def _latent_direct_width(config: ModelConfig) -> int:
    """Return the width of the input of the queries' matrix, if there is a single one."""
    return 0 if config.latent.q_rank else config.hidden


LATENT = MixerCost(
    needs_norm=True,
    attends=True,
    elements=_latent_elements,
    operations=_of_scores,
    input_width=_latent_input_width,
    direct_width=_latent_direct_width,
    shared_width=lambda config: config.latent.rope_dim,
)


def _sparse_operations(config: ModelConfig, tokens: int) -> float:
    """Return the operations of attention's scores, and of the indexer's scores, which have no backward pass.

    Attention's scores are computed for all keys; those of keys that the indexer did not choose are hidden.
    """
    of_indexer = 2.0 * config.indexer.heads * config.indexer.head_dim * tokens
    return _of_scores(config, tokens) + of_indexer


SPARSE = MixerCost(
    needs_norm=True,
    attends=True,
    has_indexer=True,
    elements=_latent_elements,
    operations=_sparse_operations,
    input_width=_latent_input_width,
    direct_width=_latent_direct_width,
    shared_width=lambda config: config.latent.rope_dim,
)


def _delta_net_elements(config: ModelConfig, _: LayerKind) -> float:
    """Return the inputs of the convolution and of the scan, and the input of the last matrix."""
    linear = config.linear
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    return 2 * (2 * keys + values) + values


def _wide_delta_net_elements(config: ModelConfig, _: LayerKind) -> float:
    """Return the convolution's output, q and k before and after their norms, numbers of each head, and the gated norm."""
    linear = config.linear
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    of_heads = 2 * linear.key_heads + 7 * linear.value_heads
    return (2 * keys + values) + 4 * keys + of_heads + 5 * values


def _delta_net_operations(config: ModelConfig, _: int) -> float:
    """Return the operations on the state: it decays, is read at the key, is updated, and is read at the query."""
    linear = config.linear
    return 3 * 7.0 * linear.value_heads * linear.key_dim * linear.value_dim


def _delta_net_channels(config: ModelConfig, ranks: int) -> int:
    """Return the channels of q, k and v, two numbers of each head, and the channels of the result."""
    linear = config.linear
    keys = max(linear.key_heads, ranks) * linear.key_dim
    values = linear.value_heads * linear.value_dim
    return (2 * keys + values) + 2 * linear.value_heads + values


DELTA_NET = MixerCost(
    channels_of_states=_delta_net_channels,
    elements=_delta_net_elements,
    wide_elements=_wide_delta_net_elements,
    operations=_delta_net_operations,
    input_width=_hidden,
)


def _kimi_delta_elements(config: ModelConfig, kind: LayerKind) -> float:
    """Return what a delta net keeps, and the two narrow gates."""
    return _delta_net_elements(config, kind) + 2 * config.linear.value_dim


def _wide_kimi_delta_elements(config: ModelConfig, _: LayerKind) -> float:
    """Return the convolution's output, q and k before and after their norms, the decay of each channel of a key and its two
    terms, numbers of each head, and the gated norm.
    """
    linear = config.linear
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    of_heads = 2 * linear.key_heads + 2 * linear.value_heads
    return (2 * keys + values) + 4 * keys + 3 * keys + of_heads + 4 * values


def _kimi_delta_channels(config: ModelConfig, _: int) -> int:
    """Return the channels of q, k and v, the decay of each channel of a key, a number of each head, and the result's channels."""
    linear = config.linear
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    return (2 * keys + values) + keys + linear.value_heads + values


KIMI_DELTA = MixerCost(
    needs_norm=True,
    channels_of_states=_kimi_delta_channels,
    elements=_kimi_delta_elements,
    wide_elements=_wide_kimi_delta_elements,
    operations=_delta_net_operations,
    input_width=lambda config: config.hidden + 2 * config.linear.value_dim,
    direct_width=_hidden,
)
"""Kimi delta attention."""


def _mamba_elements(config: ModelConfig, _: LayerKind) -> float:
    """Return the inputs of the convolution and of the scan, and the input of the last matrix."""
    mamba = config.mamba
    inner, states = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
    normed = 0 if mamba.norm == "none" else inner
    return 2 * (inner + states) + inner + normed


def _wide_mamba_elements(config: ModelConfig, _: LayerKind) -> float:
    """Return the convolution's output, numbers of each head, the scan's output, the gate and its factor, and the norm's input."""
    mamba = config.mamba
    inner, states = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
    normed = 0 if mamba.norm == "none" else inner
    return (inner + states) + 3 * mamba.heads + 3 * inner + normed


def _mamba_operations(config: ModelConfig, _: int) -> float:
    """Return the operations on the state: it decays, is updated, and is read."""
    mamba = config.mamba
    return 3 * 5.0 * mamba.heads * mamba.head_dim * mamba.state


def _mamba_channels(config: ModelConfig, ranks: int) -> int:
    """Return the channels of the convolution, the time steps of heads, and the channels of the result."""
    mamba = config.mamba
    inner, states = mamba.heads * mamba.head_dim, 2 * max(mamba.groups, ranks) * mamba.state
    return (inner + states) + mamba.heads + inner


MAMBA = MixerCost(
    channels_of_states=_mamba_channels,
    elements=_mamba_elements,
    wide_elements=_wide_mamba_elements,
    operations=_mamba_operations,
    input_width=_hidden,
)


def _convolution_operations(config: ModelConfig, _: int) -> float:
    """Return the operations of the two gates, and of a product and a sum for each position of the convolution."""
    return 3 * config.hidden * (2.0 + 2 * config.convolution.width)


CONVOLUTION = MixerCost(
    channels_of_states=lambda config, _: 2 * config.hidden,
    elements=lambda config, _: 5 * config.hidden,
    operations=_convolution_operations,
    input_width=_hidden,
)
"""It keeps its three projections, and the input and the output of the convolution."""

SIDE_BY_SIDE = MixerCost(
    needs_norm=True,
    attends=True,
    channels_of_states=_mamba_channels,
    elements=lambda config, kind: _attention_elements(config, kind) + _mamba_elements(config, kind),
    wide_elements=lambda config, kind: (
        _wide_attention_elements(config, kind) + _wide_mamba_elements(config, kind)
    ),
    operations=lambda config, tokens: (
        _of_scores(config, tokens) + _mamba_operations(config, tokens)
    ),
    input_width=lambda config: 2 * config.hidden,
    output_width=lambda config: 2 * config.hidden,
)
"""Attention and Mamba 2 on the same input."""


def entries_of(config: ModelConfig, kind: LayerKind, tokens: int) -> float:
    """Return the entries that a layer with mixer `compressed` makes of a sequence."""
    each = {"selected": config.compressed.short, "all": config.compressed.long}.get(kind.entries)
    return 0.0 if each is None else tokens / each


def _compressed_elements(config: ModelConfig, kind: LayerKind) -> float:
    """Return the latent vector, q as it is made and as attention takes it, the key, attention's output, and entries' parts."""
    attention, compressed = config.attention, config.compressed
    q = attention.heads * attention.head_dim
    parts = {
        "selected": 4 * (attention.head_dim + compressed.index_dim),
        "all": 2 * attention.head_dim,
    }
    groups = compressed.out_groups * compressed.out_rank
    return 3 * q + compressed.q_rank + 2 * attention.head_dim + groups + parts.get(kind.entries, 0)


def _compressed_operations(config: ModelConfig, tokens: int) -> float:
    """Return the operations on the keys in reach, those of an average layer, and of the indexer's scores."""
    compressed, found = config.compressed, 0.0
    of_indexer = 2.0 * compressed.index_heads * compressed.index_dim
    for kind in config.layers:
        entries = entries_of(config, kind, tokens)
        is_selected = kind.entries == "selected"
        read = min(entries, compressed.topk) if is_selected else entries
        reach = min(tokens, kind.window or tokens) + read
        found += _of_scores(config, 1) * reach + (of_indexer * entries if is_selected else 0.0)
    return found / config.layer_count


COMPRESSED = MixerCost(
    needs_norm=True,
    attends=True,
    elements=_compressed_elements,
    operations=_compressed_operations,
    input_width=lambda config: config.compressed.q_rank,
    direct_width=lambda _: 0,
    shared_width=lambda config: config.attention.head_dim,
)

COSTS: dict[str, MixerCost | None] = {
    "attention": ATTENTION,
    "latent": LATENT,
    "sparse": SPARSE,
    "linear": DELTA_NET,
    "kda": KIMI_DELTA,
    "compressed": COMPRESSED,
    "mamba": MAMBA,
    "convolution": CONVOLUTION,
    "side_by_side": SIDE_BY_SIDE,
    "none": None,
}
"""Words of LayerKind.mixer, `latent` for attention with latent vectors, and `sparse` if it also has an indexer -> its cost.

None: the layer is only an MLP.
"""


def mixer_word(config: ModelConfig, kind: LayerKind) -> str:
    """Return the word of COSTS for a layer."""
    latent = kind.mixer == "attention" and config.latent.kv_rank > 0
    if not latent:
        return kind.mixer
    return "sparse" if config.indexer.heads else "latent"


def mixer_cost(config: ModelConfig, kind: LayerKind) -> MixerCost | None:
    """Return the cost of a layer's mixer, or None if the layer has none."""
    return COSTS[mixer_word(config, kind)]
