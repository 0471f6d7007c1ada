"""Parts of Muse Glimmer and Muse Spark: gated attention with norms that have no weights, and the keys of text_config.

    hf    model.layers.{l}.{input_layernorm, self_attn, post_attention_layernorm, pre_feedforward_layernorm, mlp,
          post_feedforward_layernorm}

The embedding, q and k pass norms without weights. Queries are multiplied by a factor, and logits by another one before a
tanh limits them. Every fourth layer, counted from the last, has neither a window nor rope. Source: configuration_*.py and
modeling_*.py of muse_glimmer and muse_spark in transformers 5.23.
"""

from dataclasses import replace
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families.parts.decoder_keys import HEADS_DIVIDE_HIDDEN, LLAMA_LIKE, decoder_keys
from megaconv.families.parts.decoder_rows import HEAD
from megaconv.families.parts.delta_net import GATED_ATTENTION
from megaconv.families.parts.headless import EMBEDDING_ALONE
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    multiplier,
    need_size,
    number,
    require_each_layer,
)
from megaconv.families.parts.norm_places import norms_at
from megaconv.families.parts.rope import read_rope, rope, rope_in_one_object
from megaconv.families.parts.row_changes import hf_only, respelled, without_rows
from megaconv.families.parts.windows import layer_types, windowed_layers, windows_on
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.table import Row, Separate

_QKV = "layers.{l}.attn.{q|gate|k|v}.weight"
_ATTENTION = respelled(
    without_rows(GATED_ATTENTION, "layers.{l}.attn.{q|k}_norm.weight"),
    {_QKV: {"hf": Separate("model.layers.{l}.self_attn.{q_proj|gate_proj|k_proj|v_proj}.weight")}},
)


def muse_rows(mlps: tuple[Row, ...]) -> tuple[Row, ...]:
    """The table of a model. mlps: the rows of its MLPs and experts."""
    layers = norms_at(
        _ATTENTION,
        mlps,
        before=("input_layernorm", "pre_feedforward_layernorm"),
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
    )
    return hf_only((EMBEDDING_ALONE, *layers, *HEAD))


_THETAS, _WINDOW = "layer_rope_theta", "sliding_window"
_THETA_OF_AN_OBJECT = 1e4
"""transformers' base for an object of rope keys that has no base, in all of its classes."""


def _usual_theta(raw: Raw, theta: float) -> float:
    """rope's base if there is no key for it. theta: the base of a file without an object of rope keys."""
    has_object = raw.get("rope_parameters") is not None or bool(raw.get("rope_scaling"))
    return _THETA_OF_AN_OBJECT if has_object else theta


def _rotation(theta: float) -> Keys:
    """Base and scaling of rope. theta: the base of a file without an object of rope keys."""
    usual = rope(theta)
    return replace(usual, read=lambda raw: rope(_usual_theta(raw, theta)).read(raw))


def _layers_like_the_last(raw: Raw) -> list[bool]:
    """True for every fourth layer, counted from the last."""
    layers = need_size(raw, "num_hidden_layers")
    return [(layers - 1 - layer) % 4 == 0 for layer in range(layers)]


def _layer_keys(theta: float) -> Keys:
    """The layers with a window, and those that rope rotates. theta: rope's base if there is no key for it."""

    def read(raw: Raw) -> Fields:
        full = _layers_like_the_last(raw)
        usual = ["full_attention" if each else "sliding_attention" for each in full]
        windowed = windowed_layers(raw, usual)
        size_of_window = need_size({_WINDOW: 2048, **raw}, _WINDOW)
        return {**windows_on(raw, windowed, size_of_window), **_rotating(raw, full)}

    def _rotating(raw: Raw, full: list[bool]) -> Fields:
        base, _ = read_rope(raw, _usual_theta(raw, theta))
        stated = raw.get(_THETAS)
        listed = [0 if each else base for each in full] if stated is None else stated
        require_each_layer(_THETAS, listed, len(full))
        for each in listed:
            # The class only looks if it is 0, and rotates by rope_theta.
            if each not in (0, base):
                raise NotExpressible(
                    f"{CONFIG_NAME}: {_THETAS} has {each!r}; this architecture supports 0 and rope_theta, {base}"
                )
        return {"layers.rotates": one_or_each(tuple(bool(each) for each in listed))}

    def write(config: ModelConfig) -> Raw:
        base = config.positions.theta
        return {
            _WINDOW: config.window or 2048,
            "layer_types": layer_types(config),
            _THETAS: [base if kind.rotates else 0 for kind in config.layers],
        }

    return Keys((_WINDOW, "layer_types", _THETAS), read, write)


def muse_keys(
    *, ffn: int, kv_heads: int, head_dim: int, positions: int, theta: float, query: float, logits: float
) -> tuple[Keys, ...]:  # fmt: skip
    """The keys of a text_config. The arguments are defaults for missing keys.

    query, logits: the factors on queries and on logits.
    """
    return (
        *decoder_keys(
            positions=positions, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, epsilon=1e-5,
            rotation=rope_in_one_object(_rotation(theta)), tokens=(200000, 200001, None),
        ),
        _layer_keys(theta),
        number("qk_scale_factor", "attention.query_factor", query),
        multiplier("output_multiplier", "head.divisor", logits),
        number("final_logit_softcapping", "head.logit_cap", 20.0),
        number("post_norm_eps", "norm.output_epsilon", 1e-8),
        HEADS_DIVIDE_HIDDEN,
    )  # fmt: skip


MUSE: dict[str, Any] = {
    **LLAMA_LIKE,
    "norm.place": "both",
    "norm.zero_centered": True,
    "norm.plain_final": True,
    "norm.embedding": True,
    "norm.embedding_weight": False,
    "attention.qk_norm": True,
    "attention.qk_norm_weight": False,
    "attention.output_gate": True,
}
"""Fields of all models."""
