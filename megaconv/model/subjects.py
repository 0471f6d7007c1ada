"""The subjects of a model's description (described.py): attention, MLP, experts, positions and others.

Each field decides what the model computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LayerKind:
    """The parts of one layer of the decoder, or of the only stack."""

    mixer: str = "attention"
    """The part that mixes tokens: `attention`, `linear` (a gated delta net), `mamba` (Mamba 2), `mamba1` (Mamba 1),
    `recurrent` (a gated linear recurrence), `convolution` (a gated short convolution), `kda` (Kimi delta attention),
    `lightning` (lightning attention, MiniMax-Text-01), `side_by_side` (attention and Mamba 2 on the same input),
    `compressed` (attention with one key for all heads, DeepSeek V4), or `none` in a layer that is only an MLP."""
    mlp: str = "dense"
    """`dense`, `experts`, or `none` in a layer that is only a mixer."""
    window: int | None = None
    """Number of positions that a token attends to, including itself; None for all."""
    rotates: bool = True
    """True if rope rotates q and k of this layer. Without rope in the model it has no effect."""
    scales_positions: bool = True
    """True if positions.scaling applies to this layer. Without rope scaling in the model it has no effect."""
    chunk: int | None = None
    """Positions of a chunk: a token attends only to tokens of its own chunk. None: the sequence has no chunks."""
    heads: int | None = None
    """Attention heads of this layer; None for attention.heads. The next three fields are None for the model's size as
    well."""
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    """Width of this layer's MLP."""
    shares_kv: bool = False
    """True if attention uses the keys and values of the last layer before it that has its own, and has a window exactly
    if this layer has one."""
    keys_as_values: bool = False
    """True if the projection of keys also gives the values."""
    kv_source: int | None = None
    """Number of the earlier layer whose latent keys and values attention uses; None if it has its own."""
    shares_index: bool = False
    """True if attention reads the positions that the last indexer before this layer selected."""
    indexed: bool = False
    """True if a block indexer selects the blocks of keys that attention reads."""
    entries: str = "none"
    """The entries that a token of mixer `compressed` attends to: `none`, `all`, or `selected` by an indexer."""
    hashed: bool = False
    """True if a stored table gives the experts of each token of the vocabulary, instead of the router's scores."""
    limit: float | None = None
    """Upper limit of the activation's output, and limit of the second projection in both directions, in routed experts;
    None: no limits."""
    shared_limit: float | None = None
    """The same in the MLP and in the shared expert."""
    ngram_rows: int = 0
    """Rows of the layer's table of n-grams (Qwen4-Exp); 0 if it has none."""
    block: bool = False
    """True if a shared block of attention and an MLP comes before the mixer (Zamba 2)."""
    sparsity: float = 0.0
    """The share of the elements of an MLP's first projection that become 0: those below a limit, which follows from
    their mean and deviation. 0 in a usual MLP."""


@dataclass(frozen=True)
class Attention:
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    o_bias_last: bool = False
    """True if only the last layer has o_bias."""
    qk_norm: bool = False
    """True if q and k are normalized before rope rotates them."""
    qk_norm_width: str = "head"
    """The extent of one q or k norm: each `head` separately, or `all` heads of a projection together. `own`: each head
    separately, and each head has its own weights."""
    qk_norm_bias: bool = False
    """True if the norms of q and k have biases."""
    qk_norm_rotated: bool = False
    """True if q and k are normalized after rope rotated them."""
    qk_l2_norm: bool = False
    """True if q and k of rotating layers are divided by the root mean square of their elements: a norm without weights.
    """
    prefix: bool = False
    """True if tokens of a prompt that a caller marks (token_type_ids) attend to each other in both directions."""
    qk_norm_weight: bool = True
    """False if the norms of q and k have no trained values."""
    query_factor: float | None = None
    """A factor on queries after their norm; None for 1."""
    output_norm: bool = False
    """True if each head's output is normalized before its gate, by a norm without weights."""
    sinks: bool = False
    """True if each head has an attention sink: a logit in the softmax that takes weight and adds no value."""
    sinks_in_windows: bool = False
    """True if only layers with a window have such sinks."""
    scale: float | None = None
    """A factor on attention scores; None for 1 / sqrt(head_dim)."""
    score_cap: float | None = None
    """A tanh limits scores to the range between minus and plus this value; None: no limit."""
    output_gate: bool = False
    """True if the sigmoid of another projection, as wide as that output, scales the output of attention."""
    head_gate: bool = False
    """True if the sigmoid of another projection, with one element for each head, scales the output of attention."""
    gate_bias: bool = False
    """True if a stored number for each head is added to the projection that output_gate describes."""
    gate_activation: str = "sigmoid"
    """The function of such a projection: `sigmoid` or `softplus`."""
    differential: bool = False
    """True if key/value heads and their queries work in pairs (DiffLlama): each head of a pair weights the values of both, the
    second result is subtracted from the first by a learned weight, and the difference is normalized."""
    clip: float | None = None
    """The limit of the elements of q, k and v in both directions, before norms and rope; None: no limit."""
    v_dim: int | None = None
    """Elements of one head's values; None for head_dim."""
    value_scale: float | None = None
    """A factor on values; None for 1."""
    of_experts: bool = False
    """True if each expert has its own queries and output projection, and a second router selects them (JetMoE). The experts of a
    token have kv_heads queries each, and a bias follows their weighted sum."""
    growing: bool = False
    """True if queries of each head, also of an indexer's, are multiplied by scale * log(position + 1) + bias, with two
    stored numbers for each head."""
    kept_keys: int = 0
    """Tokens that a query can attend to: those with the greatest exp(A * softplus(dt)), which is also added to scores. A
    is a stored number of each key/value head, and dt a projection of a token's values (Doge). 0: all tokens."""
    v_norm: bool = False
    """True if values are normalized like q and k, with a norm without weights."""

    @property
    def value_dim(self) -> int:
        """Elements of one head's values."""
        return self.head_dim if self.v_dim is None else self.v_dim


@dataclass(frozen=True)
class Temperature:
    """A factor on q that grows with the position (Llama 4): 1 + scale * log(1 + floor((position + offset) / interval)).

    scale is 0 in models without it. A power (Beam) is (1 + (position + offset) / interval) ** scale.
    """

    scale: float = 0.0
    interval: int = 0
    """Positions with the same factor."""
    offset: int = 0
    power: bool = False
    """True if the factor is a power."""
    from_interval: bool = False
    """True if the factor is 1 + scale * log(max(1, (position + 1) / interval)), also on biases of scores, in layers without a
    window (Inkling)."""
    everywhere: bool = False
    """True if the factor applies in all layers. False: in layers that rope doesn't rotate."""


@dataclass(frozen=True)
class Positions:
    """The encoding of token positions."""

    kind: str = "rope"
    """`rope`, `learned` (a table with a row for each position), `sinusoidal` (the same table, computed), `relative`
    (trained biases on attention scores), `alibi` (biases that grow with the distance) or `none`."""
    theta: float = 10000.0
    local_theta: float | None = None
    """Rope base of the layers with a window, if they have their own. `scaling` then applies only to the other layers.
    """
    scaling: Mapping[str, Any] | None = None
    """Rope scaling in Hugging Face's form, with `rope_type`; None if positions are not scaled."""
    rotary_percent: float = 1.0
    """The share of a head's elements that rotates, from the first element on; with mixer `compressed`, up to the last."""
    local_rotary_percent: float | None = None
    """The same share in the layers with a window; None for rotary_percent."""
    interleaved: bool = False
    """True if an element rotates with its neighbour. False if it rotates with the element half a head further on."""
    scaled_frequencies: bool = False
    """True if a stored number for each rotating pair is the logarithm of a factor on its frequency."""
    backwards: bool = False
    """True if rope rotates in the other direction."""
    sections: tuple[int, ...] | None = None
    """Pairs of elements that rotate by a token's position in height, width and time. For text, all three positions are
    equal. None: a token has one position."""
    offset: int = 0
    """Rows of the table of learned or computed positions before the row of the first position."""
    by_layer: bool = False
    """True if each layer has relative positions of its own. False: all layers of a stack share a table."""
    buckets: int = 0
    """Number of distances that relative positions distinguish. The largest of them is max_distance."""
    max_distance: int = 0
    stored: bool = field(default=False, compare=False)
    """True if files hold the tables of computed positions (Pegasus). Configurations are compared without it."""


@dataclass(frozen=True)
class Norm:
    kind: str = "RMSNorm"
    """`RMSNorm` or `LayerNorm`."""
    epsilon: float = 1e-5
    zero_centered: bool = False
    """True if a norm multiplies by its weight + 1."""
    place: str = "before"
    """The place of the norms. `before`: before each sublayer. `after`: on the sublayer's output, before it is added.
    `both`: both of these. `after_sum`: on the sum of the sublayer's input and output, as in the original BERT. `by_mixer`: as
    `before` in layers with a delta net, and as `after` in all other layers (OLMo Hybrid). `residual`: before each sublayer,
    and the norm's output is also what the sublayer's output is added to (MiniMax-Text-01)."""
    final: bool = True
    """True if a norm follows the last layer."""
    weight: bool = True
    """False if norms of hidden states have no trained values: neither weights nor biases."""
    bias: bool = True
    """False if a LayerNorm has no biases. An RMSNorm never has."""
    shared: bool = False
    """True if attention and the MLP of a layer have one norm before both. Only in models with parallel residuals."""
    embedding: bool = False
    """True if a norm follows the embedding."""
    embedding_weight: bool = True
    """False if that norm has no trained values."""
    skips_first: bool = False
    """True if layer 0 has no norm before its mixer, because the norm of the embedding comes before it."""
    plain_final: bool = False
    """True if the norm after the last layer multiplies by its weight, although the others multiply by theirs + 1."""
    output_epsilon: float | None = None
    """Epsilon of the norms after sublayers; None for the epsilon of all other norms."""
    final_epsilon: float | None = None
    """Epsilon of the norm after the last layer; None for the epsilon of all other norms."""
    scales_first: bool = False
    """True if the norm after the MLP or the experts multiplies by its weight before it normalizes, and the norm after
    attention has no weight (Muse Spark)."""
    inner: bool = False
    """True if a norm is before the last matrix of attention and of the MLP, over all heads and over the whole width."""
    gate_rank: int = 0
    """Width of the gate of a norm before attention or experts: the sigmoid of an MLP of two matrices, with silu between
    them, scales the norm's output. 0 if norms have no gates."""
    after_experts: bool = False
    """True if a norm follows the experts of a layer, although `place` has none after other sublayers."""


@dataclass(frozen=True)
class MLP:
    """The MLP of dense layers. Its activation, gate and clamp also apply to experts."""

    ffn: int
    activation: str = "silu"
    """`silu`, `relu`, `relu2` (relu squared), `gelu` (exact), `gelu_tanh` (approximate), `quick_gelu` (x *
    sigmoid(1.702 x)), `situ` (cap * tanh(x / cap) * sigmoid(x)) or `xielu`: a polynomial above 0 and an exponential below
    it, with four stored numbers for each layer (arXiv 2411.13010)."""
    gated: bool = True
    """True if the activation's output is multiplied by a second projection."""
    bias: bool = False
    clamp: float | None = None
    """Upper limit of the first projection, and limit of the second projection in both directions; None: no limits."""
    offset: float = 0.0
    """A number that is added to the second projection."""
    situ_cap: float | None = None
    """The cap of `situ`; None for every other activation."""
    linear_cap: float | None = None
    """A tanh limits the second projection to the range between minus and plus this value; None: no limit."""

    @property
    def is_plain_swiglu(self) -> bool:
        """True if the MLP computes silu(gate) * up, and nothing else."""
        return self.gated and self.activation == "silu" and self.clamp is None and not self.offset


RANKED_BY = 2
"""Number of best experts by which a router ranks a group, if it selects groups first. It is the same in all model
families of transformers."""


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in layers with `mlp` = `experts`. count is 0 in a dense model."""

    count: int = 0
    per_token: int = 0
    ffn: int = 0
    """Width of one routed expert."""
    zero: int = 0
    """Number of further experts that a router may select, which return their input (LongCat-Flash)."""
    scored_shared: int = 0
    """Number of shared experts, as wide as the routed ones, that the router scores as well (Inkling). The weights of these
    and of the selected experts are normalized together. 0: shared experts have no weights."""
    optional: bool = False
    """True if a router may also select nothing (Zaya). It then has one output more than there are experts."""
    router_width: int = 0
    """Width of a router that is an MLP (Zaya): two matrices with gelu follow a norm of a projection to this width, to which
    the layer before adds its own projection, scaled by stored numbers. 0: a router is one matrix."""
    stores_idle: bool = field(default=False, compare=False)
    """True if files hold matrices of these experts, which nothing computes with. Configurations are compared without it."""
    joins_late: bool = False
    """True if the sum of the routed experts is added after the next layer, and that of the shared expert after their own."""
    vision_ffn: int = 0
    """Width of one routed expert for the tokens of images (ERNIE 4.5 VL). A layer then has as many of these as of `ffn`,
    with a router of their own; 0 if the same experts work on all tokens."""
    shared_ffn: int = 0
    """Width of the shared expert, which every token passes; 0 if there is none."""
    shared_gate: bool = False
    """True if a gate scales the shared expert's output."""
    score: str = "softmax"
    """The function that turns router logits into weights: `softmax`, `sigmoid`, `sqrt_softplus`: the root of a softplus, or
    `sparsemixer`: for each chosen expert a softmax over the logits near its own, without those chosen before."""
    nearness: float = 0.0
    """The greatest relative distance of such logits, divided by 2."""
    renormalize: bool = True
    """True if the weights of the selected experts are normalized to sum up to 1."""
    scale: float | None = None
    """A factor on the weights of the selected experts."""
    groups: int | None = None
    group_topk: int | None = None
    """The router selects experts from the best group_topk of `groups` groups. It ranks a group by the sum of its best
    RANKED_BY experts. None if there are no groups."""
    router_bias: bool = False
    """True if a bias per expert, in fp32, affects the selection (but not the weights)."""
    bias_on_logits: bool = False
    """True if that bias is added to the router's logits, not to the scores that a sigmoid makes of them."""
    latent: int = 0
    """Width of the routed experts' input and output, if projections connect them to the hidden states; 0 if experts
    work on the hidden states."""
    latent_norm: bool = False
    """True if a norm is between the routed experts' weighted sum and the projection to the hidden states."""
    normed_latent: bool = False
    """True if a norm follows the projection to the routed experts' input, and another one the output of each expert."""
    output_bias: bool = False
    """True if a bias follows the weighted sum of the routed experts."""
    divided_logits: bool = False
    """True if the router's logits are divided by head.divisor as well."""
    clamp: float | None = None
    """As mlp.clamp, in routed experts alone; None: no limits."""
    probs_on_input: bool = False
    """True if the weights scale the experts' inputs instead of their outputs."""
    own_norms: bool = False
    """True if the router, the routed experts and the shared expert have norms of their own (Gemma 4): the router's input
    has one with a weight, both kinds of experts have one after them, and the routed experts have one before them. A
    stored number scales the weight of each expert."""


@dataclass(frozen=True)
class Encoder:
    """A stack of layers that the decoder attends to."""

    layers: int = 0
    """Number of encoder layers; 0 if there is only one stack."""
    ffn: int = 0
    """Width of the encoder's MLPs; 0 for mlp.ffn, that of the decoder's."""
    heads: int = 0
    """Attention heads of the encoder, which are together as wide as those of the decoder; 0 for attention.heads."""


@dataclass(frozen=True)
class Factors:
    """Factors on activations inside a layer (Falcon-H1, MiniMax-Text-01); 1 in all other models."""

    keys: float = 1.0
    attention_in: float = 1.0
    """On the normed input of attention."""
    attention_out: float = 1.0
    mamba_in: float = 1.0
    """On the normed input of Mamba 2."""
    mamba_out: float = 1.0
    mamba_z: float = 1.0
    """On a projection of Mamba 2, as the four below."""
    mamba_x: float = 1.0
    mamba_b: float = 1.0
    mamba_c: float = 1.0
    mamba_dt: float = 1.0
    mlp_gate: float = 1.0
    """On the input of the MLP's activation."""
    mlp_down: float = 1.0
    """On the output of the MLP or the experts."""
    attention_residual: float = 1.0
    """On the values that the output of attention is added to."""
    lightning_residual: float = 1.0
    """On the values that the output of lightning attention is added to."""
    lightning_out: float = 1.0
    mlp_residual: float = 1.0
    """On the values that the output of the MLP or the experts is added to."""


@dataclass(frozen=True)
class Head:
    """The parts after the last layer, without the output matrix."""

    bias: bool = False
    """True if the head has a bias per token of the vocabulary. It matters only for heads that may lack one."""
    activation: str = ""
    """Activation of the transform before a masked-language-model head, with the values of `mlp.activation`; empty if
    there is no transform."""
    projection: str = ""
    """Activation of a matrix between the last norm and the head of a decoder, with the values of `mlp.activation`. A norm
    follows the activation. Empty if there is no such matrix."""
    binary: bool = False
    """True if a pooler and a head predict whether the second segment follows the first."""
    classes: int = 0
    """Number of classes of a head on the pooled first token (classification); 0 if there is none."""
    choices: bool = False
    """True if a head scores the pooled first token of each of several choices (multiple choice)."""
    pooler: bool = False
    """True if the files hold a pooler that the head doesn't compute with, beside a masked-language-model head."""
    logit_cap: float | None = None
    """A tanh limits logits to the range between minus and plus this value; None: no limit."""
    divisor: float | None = None
    """A number that logits are divided by; None for 1."""
    normalized: bool = False
    """True if each row of the head's matrix is divided by its length before it is multiplied with the hidden states."""
    unpredicted: int = 0
    """Tokens at the end of the vocabulary that the head has no rows for: the model reads them and never predicts them."""
    left_out: int = 0
    """Tokens at the end of the vocabulary whose logits are left out, although the head has rows for them."""
    labels: int = 0
    """Number of scores that the head gives for each token, instead of one for each token of the vocabulary: of a reward
    model, a critic or a classifier. 0 in a language model."""
    labels_bias: bool = False
    """True if each of these scores has a bias."""
    of_tokens: bool = False
    """True if the scores of all tokens are meant (XForTokenClassification). False: those of the last token, which stands
    for its text (XForSequenceClassification). The head computes the same."""
