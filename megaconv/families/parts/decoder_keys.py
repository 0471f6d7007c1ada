"""Keys of config.json that Llama-like architectures share, in the forms of transformers 4 and 5.

transformers 4 writes torch_dtype, and transformers 5 writes dtype. megaconv reads both and writes the older key, which
both versions understand. Keys of rope are in rope.py, and those of windows in windows.py.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    flags,
    need_flag,
    need_size,
    need_token,
    need_tokens,
    number,
    size,
)
from megaconv.families.parts.rope import FULL_ROTATION, rope
from megaconv.model.config import ModelConfig

LLAMA_LIKE: dict[str, Any] = {
    "positions.kind": "rope",
    "norm.kind": "RMSNorm",
    "mlp.activation": "silu",
    "mlp.gated": True,
}
"""Fields that all Llama-like architectures share."""
LAYER_NORM: dict[str, Any] = {"positions.kind": "rope", "norm.kind": "LayerNorm"}
SQUARED_RELU: dict[str, Any] = {"mlp.activation": "relu2", "mlp.gated": False}
LEARNED_POSITIONS: dict[str, Any] = {
    "positions.kind": "learned",
    "norm.kind": "LayerNorm",
    "mlp.gated": False,
}
ALL_BIASES: dict[str, Any] = {
    "attention.qkv_bias": True,
    "attention.o_bias": True,
    "mlp.bias": True,
}
"""Fields that some architectures have instead of these."""
SILU: dict[str, Any] = {"hidden_act": "silu"}
"""The only activation of most of these architectures."""

Tokens = tuple[int | None, int | tuple[int, ...] | None, int | None]
"""Ids of the bos, eos and pad tokens."""


def model_keys(*, tied: bool, tokens: Tokens) -> tuple[Keys, ...]:
    """Keys that have the same names in all architectures. tied: the default for a missing tie_word_embeddings."""
    bos, eos, pad = tokens

    def read(raw: Raw) -> Fields:
        return {
            "bos_token_id": need_token(raw, "bos_token_id", bos),
            "eos_token_id": need_tokens(raw, "eos_token_id", eos),
            "pad_token_id": need_token(raw, "pad_token_id", pad),
        }

    def write(config: ModelConfig) -> Raw:
        ends = config.eos_token_id
        return {
            "bos_token_id": config.bos_token_id,
            "pad_token_id": config.pad_token_id,
            "eos_token_id": list(ends) if isinstance(ends, tuple) else ends,
        }

    return (
        size("vocab_size", "vocab"),
        Keys(
            ("tie_word_embeddings",),
            lambda raw: {"tie_embeddings": need_flag(raw, "tie_word_embeddings", tied)},
            lambda config: {"tie_word_embeddings": config.tie_embeddings},
        ),
        Keys(("torch_dtype", "dtype"), _read_dtype, lambda config: {"torch_dtype": config.dtype}),
        Keys(("bos_token_id", "eos_token_id", "pad_token_id"), read, write),
    )


def _read_dtype(raw: Raw) -> Fields:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return {"dtype": str(dtype).removeprefix("torch.")}


def heads(
    kv_heads: int | None,
    head_dim: int | None = None,
    *,
    own_size: bool = True,
    as_wide: bool = False,
) -> Keys:
    """Grouped queries, with defaults as in decoder_keys.

    own_size: True if there is a head_dim key; otherwise the head size is hidden_size / heads. as_wide: True if there is such a
    key, but the class works only if all heads together are as wide as the hidden states.
    """
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")[: 3 if own_size else 2]

    def read(raw: Raw) -> Fields:
        hidden = need_size(raw, "hidden_size")
        count = need_size(raw, "num_attention_heads")
        given = {"num_key_value_heads": kv_heads, **raw}
        # null means that each head has its own keys and values.
        groups = need_size(given, "num_key_value_heads", count)
        if count % groups:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: num_key_value_heads {groups} doesn't divide num_attention_heads {count}"
            )
        if not own_size and hidden % count:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: num_attention_heads {count} doesn't divide hidden_size {hidden}"
            )
        stated = raw.get("head_dim", head_dim) if own_size else None
        return {
            "attention.heads": count,
            "attention.kv_heads": groups,
            "attention.head_dim": stated or hidden // count,
        }

    def write(config: ModelConfig) -> Raw:
        sizes = config.attention
        written = {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads}
        if as_wide and sizes.heads * sizes.head_dim != config.hidden:
            raise NotExpressible(
                f"the model's attention.heads x attention.head_dim is {sizes.heads} x {sizes.head_dim}, and its class needs a hidden of "
                f"as many channels, found {config.hidden}"
            )
        if own_size:
            written["head_dim"] = sizes.head_dim
        return written

    return Keys(names, read, write)


def _require_whole_heads(config: ModelConfig) -> Raw:
    """Raise NotExpressible if the number of heads doesn't divide the hidden size."""
    count = config.attention.heads
    if config.hidden % count:
        raise NotExpressible(
            f"the model's attention.heads is {count}, and its class needs a number that divides hidden, found {config.hidden}"
        )
    return {}


HEADS_DIVIDE_HIDDEN = Keys((), lambda raw: {}, _require_whole_heads)
"""No key: the class refuses a hidden size that the number of heads doesn't divide, also beside a head_dim."""


def multi_head(key: str, hidden_key: str, *, multiple: int = 1) -> Keys:
    """Attention heads whose size is hidden size / heads, each with its own keys and values.

    multiple: a number that their number has to be a multiple of.
    """

    def read(raw: Raw) -> Fields:
        hidden, heads = need_size(raw, hidden_key), need_size(raw, key)
        if hidden % heads:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {key} {heads} doesn't divide {hidden_key} {hidden}"
            )
        if heads % multiple:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {key} should be a multiple of {multiple} in this architecture, found {heads}"
            )
        return {
            "attention.heads": heads,
            "attention.kv_heads": heads,
            "attention.head_dim": hidden // heads,
        }

    return Keys((key,), read, lambda config: {key: config.attention.heads})


GATED_SILU = choice("hidden_act", "mlp.activation", {"silu": "silu", "swish": "silu"}, "silu")
"""Two names for the same activation."""
ATTENTION_BIASES = flags(
    "attention_bias", ("attention.qkv_bias", "attention.o_bias"), default=False
)
"""Biases on all of attention's projections, or on none."""

PARALLEL: dict[str, Any] = {"parallel_residual": True, "norm.shared": True}
"""Fields of layers whose attention and MLP work in parallel on the output of one norm."""
GELUS = {
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""transformers' names of gelu, exact and approximate."""

DENSE = (
    "rope pre_norm !sinks !clamped !output_gate !linear_layers !hybrid_stack !qk_l2_norm !probs_on_input !mixture !mla !encoder "
    "!transform"
)
"""Features that distinguish dense decoders with rotary positions from all other models."""
PLAIN = f"{DENSE} !norm_bias silu gated !zero_centered !interleaved !skips_rope"
"""Features that distinguish Llama-like decoders among them. Each family adds the features that distinguish it from the
others."""
MIXTURE = PLAIN.replace("!mixture", "mixture")


def body_keys(
    *,
    positions: int,
    ffn: int | None = None,
    epsilon: float = 1e-6,
    epsilon_key: str | None = "rms_norm_eps",
    rotation: Keys | None = None,
    partial: Keys = FULL_ROTATION,
    tied: bool = False,
    tokens: Tokens = (None, None, None),
) -> tuple[Keys, ...]:
    """The keys of every Llama-like architecture, except those of attention heads and activation.

    The arguments are transformers' own defaults for optional keys, unless this list says otherwise:

    positions   max_position_embeddings
    ffn         intermediate_size; None: the key is required
    epsilon     the key `epsilon_key`, which is a name; None: there is no such key
    rotation    the declaration of rope's keys; None: rope with a base of 10000
    partial     the declaration of the share of each head that rotates
    tied        tie_word_embeddings
    tokens      bos_token_id, eos_token_id and pad_token_id
    """
    epsilon_keys = () if epsilon_key is None else (number(epsilon_key, "norm.epsilon", epsilon),)
    return (
        size("hidden_size", "hidden"),
        size("num_hidden_layers", "layers.count"),
        size("intermediate_size", "mlp.ffn", ffn),
        size("max_position_embeddings", "max_positions", positions),
        *epsilon_keys,
        rotation or rope(10000.0),
        partial,
        *model_keys(tied=tied, tokens=tokens),
    )


def decoder_keys(
    *,
    positions: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    ffn: int | None = None,
    epsilon: float = 1e-6,
    epsilon_key: str = "rms_norm_eps",
    rotation: Keys | None = None,
    partial: Keys = FULL_ROTATION,
    tied: bool = False,
    tokens: Tokens = (None, None, None),
) -> tuple[Keys, ...]:
    """The keys of body_keys, plus those of attention heads.

    kv_heads    num_key_value_heads; None: as many as heads
    head_dim    head_dim; None: hidden_size / heads
    """
    body = body_keys(
        positions=positions,
        ffn=ffn,
        epsilon=epsilon,
        epsilon_key=epsilon_key,
        rotation=rotation,
        partial=partial,
        tied=tied,
        tokens=tokens,
    )
    return (*body, heads(kv_heads, head_dim))
