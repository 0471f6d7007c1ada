"""The subjects of a model's description (described.py) about single kinds of mixers: the parts of a layer that mix tokens.

All sizes are 0 in models without such layers. subjects.py has plain attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LinearAttention:
    """The layers with mixer `linear`: gated delta nets (arXiv 2412.06464), or with mixer `kda`: Kimi delta attention
    (arXiv 2510.26692), which forgets each channel of a key by itself. All sizes are 0 in models without such layers."""

    key_heads: int = 0
    """Number of key heads, and of q heads. Each serves the same number of value heads."""
    value_heads: int = 0
    key_dim: int = 0
    """Elements of one key head."""
    value_dim: int = 0
    conv: int = 0
    """Width of the convolution over q, k and v in positions, including the token's own."""
    double_writes: bool = False
    """True if the amount written is twice a sigmoid, so that it may replace more than the old value."""
    full_rank_gates: bool = False
    """True if each of the two gates of Kimi delta attention is one projection, not the product of two narrow ones."""
    full_rank_out_gate: bool = False
    """True if only the gate of its output is one projection, and the gate that forgets is such a product."""
    forget_bound: float | None = None
    """The least logarithm of a decay of Kimi delta attention, which is a factor on a sigmoid. None: minus a softplus."""
    gate: str = "silu"
    """The function of the gate of a gated delta net's output: `silu` or `sigmoid`."""
    out_epsilon: float | None = None
    """Epsilon of the norm at the end of a delta net; None for the epsilon of all other norms."""
    stored_decays: int = field(default=0, compare=False)
    """Elements of A_log in the files, if zeros follow those of the heads (Kimi K3); 0: as many as heads.

    Configurations are compared without it, since the zeros have no effect.
    """


@dataclass(frozen=True)
class Mamba:
    """The layers with mixer `mamba`: Mamba 2 (arXiv 2405.21060), with a convolution over 4 positions. All sizes are 0
    in models without such layers."""

    heads: int = 0
    head_dim: int = 0
    groups: int = 0
    """Number of groups of heads. Each group has one B and one C."""
    state: int = 0
    """Elements of B, and of C."""
    norm: str = "after_gate"
    """The place of the norm at the end of a mixer: `after_gate`, `before_gate`, or `none` without such a norm."""
    out_epsilon: float | None = None
    """Epsilon of this norm; None for the epsilon of all other norms."""
    least_time_step: float | None = field(default=None, compare=False)
    """Lower limit of time steps; None: no limit.

    Configurations are compared without it, since each library uses its own value. transformers has the limit
    LEAST_TIME_STEP, Megatron has none. The families' notices report the difference.
    """


@dataclass(frozen=True)
class Recurrent:
    """The layers with mixer `recurrent`: gated linear recurrences (RG-LRU, arXiv 2402.19427). All sizes are 0 in models
    without such layers."""

    head_dim: int = 0
    """Channels of each of attention.heads heads. A channel has a state of one number, and a head has gates of its own."""
    conv: int = 0
    """Width of the convolution in positions, including the token's own."""


@dataclass(frozen=True)
class ConvolvedAttention:
    """Attention whose q and k pass two convolutions over positions (Zaya, arXiv 2510.04476). Means of each key and its queries
    are added to the results, which are scaled to one length, and keys by a stored number of each key/value head. The second
    half of a token's values is a projection of the token before it. All sizes are 0 in models without it."""

    channels: int = 0
    """Width of the first convolution in positions, including the token's own. It works on single channels."""
    heads: int = 0
    """Width of the second one. It works on all channels of a head."""


@dataclass(frozen=True)
class RelativeAttention:
    """Attention with a bias by distance that depends on the token (Inkling). Each head of a query has a vector of `width`
    elements, which weights as many stored profiles: rows of a matrix with a column for each distance. Beyond `extent`, the
    bias is 0. Scores are divided by head_dim instead of its root. All sizes are 0 in models without it."""

    width: int = 0
    extent: int = 0
    """Distances of a profile in layers without a window. In the others, it is the window."""


@dataclass(frozen=True)
class Mamba1:
    """The layers with mixer `mamba1`: Mamba 1 (arXiv 2312.00752). All sizes are 0 in models without such layers."""

    width: int = 0
    """Channels of the mixer. Each has a state of its own."""
    state: int = 0
    """Elements of the state of a channel."""
    conv: int = 0
    """Width of the convolution in positions, including the token's own."""
    rank: int = 0
    """Width of the vector from which the time steps of all channels are computed."""
    heads: int = 0
    """Equal parts of the channels, each with a projection of its own to time steps, B and C (Zamba). 0: one for all."""
    bias: bool = False
    """True if the first and the last projection have biases."""
    conv_bias: bool = True
    norms: str = "none"
    """The norms of the time steps' vector, of B and of C: `weighted`, `bare` without weights, or `none`."""
    norm_epsilon: float | None = None
    """Epsilon of these norms; None for the epsilon of all other norms."""


@dataclass(frozen=True)
class SharedBlocks:
    """Blocks of attention and an MLP that several layers share (Zamba 2, arXiv 2411.15242). A block reads the hidden states
    and the embedding side by side, and has no residuals. A matrix of the layer follows it, and the sum with the hidden
    states is the input of the layer's mixer. All numbers are 0 in models without such blocks."""

    count: int = 0
    """Number of blocks. The layers that have one (layers.block) take them in turn."""
    adapter_rank: int = 0
    """Rank of the product of two matrices that each layer adds to gate and up of its block; 0 for none (Zamba 1)."""
    attention_adapters: bool = False
    """True if each layer also adds such products to q, k and v of its block."""


@dataclass(frozen=True)
class ShortConvolution:
    """The layers with mixer `convolution` (LFM 2): each channel is a weighted sum of its last few tokens, with a gate
    before the sum and another after it. The channels are as many as the hidden states are wide."""

    width: int = 0
    """Width of the convolution in positions, including the token's own; 0 in models without such layers."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). All sizes are 0 in models without it."""

    kv_rank: int = 0
    """Width of the latent vector from which keys and values are computed."""
    q_rank: int = 0
    """Width of the latent vector from which queries are computed; 0 if queries are computed directly."""
    rope_dim: int = 0
    """Rotating elements of head_dim: its last elements, in pairs. All heads share the rotating part of the keys."""
    v_dim: int = 0
    """Elements of one head's values."""
    gated: bool = False
    """True if queries are computed from their latent vector before and after its norm, together with a gate: its sigmoid
    scales the output of attention."""
    halves: bool = False
    """True if a rotating element rotates with the one half of the rotating part further on, not with its neighbour."""
    scaled: bool = False
    """True if queries are multiplied by the root of hidden / q_rank, and the normed latent vector of keys and values by the
    root of hidden / kv_rank (LongCat-Flash)."""
    norm_epsilon: float | None = field(default=None, compare=False)
    """Epsilon of the norms of latent vectors; None for the epsilon of all other norms.

    Configurations are compared without it, since each library uses its own value and ignores the configuration.
    transformers uses LATENT_EPSILON. Megatron and llama.cpp use the epsilon of all other norms. The families' notices
    report the difference.
    """


@dataclass(frozen=True)
class Indexer:
    """The indexer of sparse latent attention (DeepSeek V3.2): it selects the positions that a token attends to. All
    sizes are 0 in models without it."""

    heads: int = 0
    head_dim: int = 0
    """Elements of one head, of which `latent.rope_dim` rotate."""
    topk: int = 0
    """Number of positions selected for each token."""
    pool: int = 0
    """Keys of a group, of which the indexer selects whole ones: it ranks a group by a weighted sum of its keys. 0 if there are
    no groups."""
    keeps_tail: bool = False
    """True if the last keys, which don't fill a group, are always selected."""
    from_hidden: bool = False
    """True if queries of the indexer come from the hidden states after a LayerNorm. False: from the latent vector of
    attention's queries."""
    interleaved: bool = False
    """True if an element rotates with its neighbour. False if it rotates with the element half of the rotating part
    further on."""
    rotates_last: bool = False
    """True if the last elements of a head rotate. False if the first ones do."""


@dataclass(frozen=True)
class BlockIndexer:
    """The indexer of layers that attend to blocks of keys (MiniMax M3). It ranks a block by the best score of its keys.
    All sizes are 0 in models without it."""

    heads: int = 0
    head_dim: int = 0
    """Elements of one head."""
    block: int = 0
    """Keys of a block."""
    topk: int = 0
    """Number of blocks selected for each token and head."""
    local: int = 0
    """Blocks up to the token's own that are always selected."""
    pooled: bool = False
    """True if a block is ranked by the mean of its keys, and its scores of all heads are added (Qwen4-Exp). The last keys
    are then always read if they don't fill a block."""


@dataclass(frozen=True)
class CompressedAttention:
    """The layers with mixer `compressed` (DeepSeek V4). All heads share one key, which is the value as well. Queries come
    from a latent vector. Beside the tokens in its window, a token may attend to entries: each is a weighted sum of
    several earlier tokens. All sizes are 0 in models without such layers."""

    q_rank: int = 0
    """Width of the latent vector from which queries are computed."""
    out_groups: int = 0
    """Groups of heads. Each has a projection of its own to out_rank elements; one matrix joins the groups."""
    out_rank: int = 0
    short: int = 0
    """Tokens of an entry in layers with selected entries. Each token also counts for the next entry."""
    long: int = 0
    """Tokens of an entry in layers with all entries."""
    index_heads: int = 0
    """Heads of the indexer, which selects entries."""
    index_dim: int = 0
    """Elements of one head of the indexer."""
    topk: int = 0
    """Number of entries selected for each token."""
    theta: float = 10000.0
    """Rope base in layers with entries. Other layers have the model's base."""
    scaling: Mapping[str, Any] | None = None
    """Rope scaling in layers with entries, in the form of positions.scaling."""
