"""Keys of config.json that Llama-like architectures share, as transformers 4 and 5 each write them.

transformers 4 writes rope_theta, rope_scaling and torch_dtype; transformers 5 writes rope_parameters and dtype.
We read both, and write the older keys, which both versions understand.
"""

from collections.abc import Mapping
from math import isclose, log
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, choice, need_number, need_size, number, size
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer

LLAMA_LIKE: dict[str, Any] = {
    "positions.kind": "rope",
    "norm.kind": "RMSNorm",
    "mlp.activation": "silu",
    "mlp.gated": True,
}
"""What all of them have."""
LAYER_NORM: dict[str, Any] = {"positions.kind": "rope", "norm.kind": "LayerNorm"}
SQUARED_RELU: dict[str, Any] = {"mlp.activation": "relu2", "mlp.gated": False}
"""What some have instead, or of that."""
SILU: dict[str, Any] = {"hidden_act": "silu"}
"""The one activation that most of these architectures have."""

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SCALING = {"linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",), "llama3": _LLAMA3}
"""What each kind of rope scaling needs."""


Tokens = tuple[int | None, int | tuple[int, ...] | None, int | None]
"""Ids of bos, eos and pad."""


def model_keys(*, tied: bool, tokens: Tokens) -> tuple[Keys, ...]:
    """What all architectures say with the same keys; tied: whether the head is, where the key is missing."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")

    def read(raw: Raw) -> Fields:
        found = {name: raw.get(name, default) for name, default in zip(names, tokens, strict=True)}
        eos = found["eos_token_id"]
        return found | {"eos_token_id": tuple(eos) if isinstance(eos, list) else eos}

    def write(config: ModelConfig) -> Raw:
        eos = config.eos_token_id
        written = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
        return written | {"eos_token_id": list(eos) if isinstance(eos, tuple) else eos}

    return (
        size("vocab_size", "vocab"),
        Keys(
            ("tie_word_embeddings",),
            lambda raw: {"tie_embeddings": bool(raw.get("tie_word_embeddings", tied))},
            lambda config: {"tie_word_embeddings": config.tie_embeddings},
        ),
        Keys(("torch_dtype", "dtype"), _read_dtype, lambda config: {"torch_dtype": config.dtype}),
        Keys(names, read, write),
    )


def _read_dtype(raw: Raw) -> Fields:
    return {"dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")}


def heads(kv_heads: int | None, head_dim: int | None = None, *, own_size: bool = True) -> Keys:
    """Grouped queries; the numbers as in decoder_keys. own_size: whether there is a head_dim; otherwise heads share hidden_size out."""

    def read(raw: Raw) -> Fields:
        hidden, count = need_size(raw, "hidden_size"), need_size(raw, "num_attention_heads")
        given = {"num_key_value_heads": kv_heads, **raw}
        groups = count if given["num_key_value_heads"] is None else need_size(given, "num_key_value_heads")
        if count % groups:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: num_key_value_heads {groups} doesn't divide num_attention_heads {count}"
            )
        if not own_size and hidden % count:
            raise CorruptCheckpoint(f"{CONFIG_NAME}: num_attention_heads {count} doesn't divide hidden_size {hidden}")
        each = (raw.get("head_dim", head_dim) if own_size else None) or hidden // count
        return {"attention.heads": count, "attention.kv_heads": groups, "attention.head_dim": each}

    def write(config: ModelConfig) -> Raw:
        found = config.attention
        written = {"num_attention_heads": found.heads, "num_key_value_heads": found.kv_heads}
        return written | ({"head_dim": found.head_dim} if own_size else {})

    return Keys(("num_attention_heads", "num_key_value_heads", *(["head_dim"] if own_size else [])), read, write)


# Rope.

_PERCENT = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", _ORIGINAL)
_SCALED_FROM_A_LENGTH = ("llama3", "yarn", "longrope")
"""Kinds of rope scaling whose length in training transformers 5 takes from beside them, where config.json says it there."""


def rope(theta: float, scaling: Mapping[str, Any] | None = None) -> Keys:
    """Base and scaling. theta, scaling: of a config.json that doesn't mention them."""

    def read(raw: Raw) -> Fields:
        # Empty rope_parameters are an answer, an empty rope_scaling isn't.
        silent = scaling is not None and not raw.get("rope_scaling") and raw.get("rope_parameters") is None
        base, found = read_rope(raw, theta)
        return {"positions.theta": base, "positions.scaling": scaling if silent else found}

    def write(config: ModelConfig) -> Raw:
        found = config.positions.scaling
        plain = None if scaling is None else {"rope_type": "default"}
        return {"rope_theta": config.positions.theta, "rope_scaling": dict(found) if found else plain}

    return Keys(_ROPE_KEYS, read, write)


def partial_rotation(default: float) -> Keys:
    """The part of each head that rotates; default: where the key is missing."""
    return Keys(
        (_PERCENT,),
        lambda raw: {"positions.rotary_percent": rotary_percent(raw, default)},
        lambda config: {_PERCENT: config.positions.rotary_percent},
    )


def _whole_heads(raw: Raw) -> Fields:
    if rotary_percent(raw, 1.0) != 1.0:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_PERCENT} {rotary_percent(raw, 1.0)} is not supported in this architecture"
        )
    return {}


WHOLE_HEADS = Keys((_PERCENT,), _whole_heads, lambda config: {})
"""Of architectures whose heads rotate whole."""


def _rope_object(raw: Raw) -> dict[str, Any]:
    """What either transformers has in an object: rope_scaling, beside which no transformers looks at rope_parameters."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key) or {}, dict):
            raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be an object, found {raw[key]!r}")
    return dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})


def rotary_percent(raw: Raw, default: float) -> float:
    """The part of each head that rotates, by the keys of either transformers; null: all of it, whatever the default."""
    found = {_PERCENT: raw.get(_PERCENT, default), **_rope_object(raw)}[_PERCENT]
    return 1.0 if found is None else float(found)


def read_rope(raw: Raw, default_theta: float) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling or None) by the keys of either transformers; what stands inside the object wins."""
    scaling = _rope_object(raw)
    theta = need_number({**raw, **scaling}, "rope_theta", default_theta)
    kind = scaling.pop("type", None)
    scaling["rope_type"] = scaling.get("rope_type") or kind or "default"
    scaling.pop("rope_theta", None)
    scaling.pop(_PERCENT, None)
    if scaling["rope_type"] in _SCALED_FROM_A_LENGTH and raw.get(_ORIGINAL) is not None:
        scaling[_ORIGINAL] = raw[_ORIGINAL]
    for name in _SCALING.get(scaling["rope_type"], ()):
        if type(scaling.get(name)) not in (int, float):
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: rope scaling {scaling['rope_type']} has no number {name}: {scaling}"
            )
    return theta, None if scaling["rope_type"] == "default" else _without_the_usual(scaling)


def _without_the_usual(scaling: dict[str, Any]) -> dict[str, Any]:
    """yarn's attention_factor is left out where it is what follows from the factor."""
    if scaling["rope_type"] != "yarn" or scaling.get("mscale") or type(scaling.get("attention_factor")) is not float:
        return scaling
    usual = 1.0 if scaling["factor"] <= 1 else 0.1 * log(scaling["factor"]) + 1
    same = isclose(scaling["attention_factor"], usual, rel_tol=1e-12)
    return {name: value for name, value in scaling.items() if name != "attention_factor"} if same else scaling


# Windows.


def window(default: int | None) -> Keys:
    """One for all layers, or none."""
    return Keys(
        ("sliding_window",),
        lambda raw: {"layers.window": raw.get("sliding_window", default) or None},
        lambda config: {"sliding_window": config.window},
    )


def layer_types(config: ModelConfig) -> list[str]:
    """transformers' name of each layer's attention."""
    return ["full_attention" if kind.window is None else "sliding_attention" for kind in config.layers]


def windowed_layers(raw: Raw, otherwise: list[str]) -> tuple[int, ...]:
    """Layers with a window, by layer_types; otherwise: what these are where the key is missing."""
    layers, kinds = need_size(raw, "num_hidden_layers"), raw.get("layer_types") or otherwise
    others = [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]
    if others:
        raise NotExpressible(f"{CONFIG_NAME}: layer_types has {others[0]!r}, which this architecture doesn't support")
    if len(kinds) != layers:
        raise CorruptCheckpoint(f"{CONFIG_NAME}: layer_types lists {len(kinds)} layers, the model has {layers}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def windows_on(raw: Raw, layers: tuple[int, ...], size_of_window: int | None) -> Fields:
    """The field of these layers' windows."""
    return {"layers.window": per_layer(layers, need_size(raw, "num_hidden_layers"), size_of_window, None)}


def windows_by_layer(default: int, *, full_every: int, pattern: tuple[str, ...] = ()) -> Keys:
    """Layer by layer. default, full_every: the window of all layers but every so many, where config.json doesn't say it.

    pattern: further keys, the first of which says full_every where there are no layer_types.
    """

    def read(raw: Raw) -> Fields:
        every = next((need_size(raw, key) for key in pattern if raw.get(key) is not None), full_every)
        layers = range(1, need_size(raw, "num_hidden_layers") + 1)
        kinds = ["sliding_attention" if layer % every else "full_attention" for layer in layers]
        return windows_on(raw, windowed_layers(raw, kinds), raw.get("sliding_window", default) or None)

    def write(config: ModelConfig) -> Raw:
        # A size even where no layer has a window: transformers' models make a mask of it all the same.
        return {"sliding_window": config.window or default, "layer_types": layer_types(config)}

    return Keys(("sliding_window", "layer_types", *pattern), read, write)


GATED_SILU = choice("hidden_act", "mlp.activation", {"silu": "silu", "swish": "silu"}, "silu")
"""Two names for one activation."""

DENSE = "rope pre_norm !sinks !clamped !output_gate !linear_layers !qk_l2_norm !probs_on_input !mixture !mla !encoder !transform"
"""What distinguishes dense decoders with rotary positions from all others."""
PLAIN = f"{DENSE} !norm_bias silu gated !zero_centered !interleaved !skips_rope"
"""What distinguishes a Llama-like one among them; what distinguishes one from another comes on top."""
MIXTURE = PLAIN.replace("!mixture", "mixture")


def body_keys(
    *,
    positions: int,
    ffn: int | None = None,
    epsilon: float = 1e-6,
    epsilon_key: str = "rms_norm_eps",
    rotation: Keys | None = None,
    partial: Keys = WHOLE_HEADS,
    tied: bool = False,
    tokens: Tokens = (None, None, None),
) -> tuple[Keys, ...]:
    """What every Llama-like architecture says, but for attention's heads and its activation.

    Numbers are transformers' own defaults for keys that may be left out: max_position_embeddings, intermediate_size (None: it
    may not), epsilon_key, rope (None: a base of 10000), whether the head is tied, the ids of tokens.
    """
    return (
        size("hidden_size", "hidden"),
        size("num_hidden_layers", "layers.count"),
        size("intermediate_size", "mlp.ffn", ffn),
        size("max_position_embeddings", "max_positions", positions),
        number(epsilon_key, "norm.epsilon", epsilon),
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
    partial: Keys = WHOLE_HEADS,
    tied: bool = False,
    tokens: Tokens = (None, None, None),
) -> tuple[Keys, ...]:
    """The same with grouped queries: num_key_value_heads (None: as many as heads), head_dim (None: hidden_size over heads)."""
    body = body_keys(
        positions=positions, ffn=ffn, epsilon=epsilon, epsilon_key=epsilon_key, rotation=rotation, partial=partial, tied=tied,
        tokens=tokens,
    )  # fmt: skip
    return (*body, heads(kv_heads, head_dim))
