"""Gemma 4, text-only models: Gemma 3's norms with plain weights, normed values, and layers of two kinds.

Layers without a window have larger heads, other numbers of key/value heads, and rope of a quarter of their elements.
The projection of keys may give their values as well. The last layers may share keys and values of earlier ones, and
have MLPs of twice the width. A model has a second embedding (layer_inputs.py), or experts beside each MLP.

Megatron core has no such modules. Megatron-Bridge's Gemma 4 multiplies weights of the experts with each other, and adds
keys and values where layers share them, so that its checkpoints don't hold these tensors as they were. These models are
therefore converted between Hugging Face's files, and trained; core's names are those of the trainer's checkpoints.
"""

from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.experts import expert_rows, shared_expert_rows
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    follows,
    maybe_number,
    need_size,
)
from megaconv.families.parts.layer_inputs import LAYER_INPUT_KEYS, LAYER_INPUTS
from megaconv.families.parts.norm_places import norms_at, output_norms_by_mlp
from megaconv.families.parts.proportional_ropes import proportional_ropes
from megaconv.families.parts.row_changes import in_all_forms, in_core, without_biases
from megaconv.families.parts.shared_kv import (
    SHARED_LAYERS,
    count_sharing,
    sharing_layers,
    unused_keys_and_values,
    with_shared_kv,
)
from megaconv.families.parts.windows import (
    layer_types,
    windowed_layers,
    windows_but_every,
    windows_on,
)
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each, per_layer
from megaconv.model.table import Row, Stacked

_HF, _CORE = "model.layers.{l}.", "decoder.layers.{l}."
SANDWICHED = norms_at(
    without_biases(ATTENTION), without_biases(MLP),
    before=("input_layernorm", "pre_feedforward_layernorm"), after=("post_attention_layernorm", "post_feedforward_layernorm"),
)  # fmt: skip
"""Attention and MLP with norms before and after them, and without biases."""
_NORM_OF_EXPERTS = Row(
    "layers.{l}.mlp_norm.weight",
    ("hidden",),
    when="moe",
    hf=_HF + "pre_feedforward_layernorm.weight",
    core=_CORE + "mlp.shared_norm.weight",
)
_OWN_NORMS = (
    Row("layers.{l}.mlp.router.norm.weight", ("hidden",), when="moe",
        hf=_HF + "router.scale",
        core=_CORE + "mlp.router.norm.weight"),
    Row("layers.{l}.mlp.router.expert_scale", ("experts",), when="moe",
        hf=_HF + "router.per_expert_scale",
        core=_CORE + "mlp.router.expert_scale"),
    Row("layers.{l}.mlp.experts_norm.weight", ("hidden",), when="moe",
        hf=_HF + "pre_feedforward_layernorm_2.weight",
        core=_CORE + "mlp.experts_norm.weight"),
    Row("layers.{l}.mlp.experts_output_norm.weight", ("hidden",), when="moe",
        hf=_HF + "post_feedforward_layernorm_2.weight",
        core=_CORE + "mlp.experts_output_norm.weight"),
    Row("layers.{l}.mlp.shared_output_norm.weight", ("hidden",), when="moe",
        hf=_HF + "post_feedforward_layernorm_1.weight",
        core=_CORE + "mlp.shared_output_norm.weight"),
)  # fmt: skip
_EXPERTS = in_all_forms(
    (
        *expert_rows("", "{|}", ""),
        *shared_expert_rows("mlp.{gate_proj|up_proj}.weight", "mlp.down_proj.weight"),
    ),
    {
        "layers.{l}.mlp.router.weight": _HF + "router.proj.weight",
        "layers.{l}.mlp.experts.{e}.{gate|up}.weight": Stacked(_HF + "experts.gate_up_proj"),
        "layers.{l}.mlp.experts.{e}.down.weight": Stacked(_HF + "experts.down_proj"),
    },
)
_SCALE = Row(
    "layers.{l}.scale",
    ("1",),
    when="layer_scale",
    hf=_HF + "layer_scalar",
    core=_CORE + "layer_scalar",
)
_LAYERS = output_norms_by_mlp(with_shared_kv(SANDWICHED))
ROWS = in_core(
    (EMBEDDING, *_LAYERS, _NORM_OF_EXPERTS, *_EXPERTS, *_OWN_NORMS, *LAYER_INPUTS, _SCALE, *HEAD)
)

_TYPES, _WINDOW, _TIED = "layer_types", "sliding_window", "attention_k_eq_v"
_HEAD_DIM, _KV_HEADS = "global_head_dim", "num_global_key_value_heads"
_EACH, _DOUBLE, _WIDTH = "per_layer_config", "use_double_wide_mlp", "intermediate_size"
_MOE = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")


def _windowed(raw: Raw) -> tuple[int, ...]:
    """The layers with a window. The last layer has none, whatever layer_types says."""
    layers = need_size(raw, "num_hidden_layers")
    found = windowed_layers(raw, windows_but_every(6, raw))
    return tuple(layer for layer in found if layer < layers - 1)


def _sizes_of_layers(raw: Raw, windowed: tuple[int, ...]) -> dict[str, Any]:
    """The sizes of attention in the layers that have their own: per_layer_config lists them, or the keys for layers
    without a window give them."""
    layers = need_size(raw, "num_hidden_layers")
    usual = {"head_dim": need_size(raw, _HEAD_DIM, 512)}
    if raw.get(_TIED) and raw.get(_KV_HEADS) is not None:
        usual["num_key_value_heads"] = need_size(raw, _KV_HEADS)
    without_window = {str(layer): usual for layer in range(layers) if layer not in windowed}
    listed: Any = raw.get(_EACH, without_window)
    return {str(layer): _known_sizes(sizes) for layer, sizes in listed.items()}


def _known_sizes(sizes: Any) -> dict[str, int]:
    known = ("head_dim", "num_key_value_heads")
    others = set(sizes).difference(known)
    if others:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_EACH} has {', '.join(sorted(others))}, which is not supported, only {' and '.join(known)} are"
        )
    return {name: need_size(sizes, name) for name in sizes}


def _read_layers(raw: Raw) -> Fields:
    layers, windowed = need_size(raw, "num_hidden_layers"), _windowed(raw)
    sharing = sharing_layers(raw, windowed, 0)
    own = _sizes_of_layers(raw, windowed)
    each = [own.get(str(layer), {}) for layer in range(layers)]
    kv_heads = tuple(sizes.get("num_key_value_heads") for sizes in each)
    producing = range(sharing.start)
    tied = [layer for layer in producing if raw.get(_TIED) and layer not in windowed]
    doubled = sharing if raw.get(_DOUBLE) else ()
    return {
        **windows_on(raw, windowed, need_size(raw, _WINDOW, 512)),
        "layers.head_dim": one_or_each(tuple(sizes.get("head_dim") for sizes in each)),
        "layers.kv_heads": one_or_each(kv_heads),
        "layers.ffn": per_layer(doubled, layers, 2 * need_size(raw, _WIDTH, 9216), None),
        "layers.shares_kv": per_layer(sharing, layers, True, False),
        "layers.keys_as_values": per_layer(tied, layers, True, False),
    }


def _write_layers(config: ModelConfig) -> Raw:
    tied = any(kind.keys_as_values for kind in config.layers)
    return {
        _TYPES: layer_types(config),
        _WINDOW: config.window or 512,
        **_write_sizes(config, tied=tied),
        _TIED: tied,
        SHARED_LAYERS: count_sharing(config),
        _DOUBLE: any(kind.ffn is not None for kind in config.layers),
    }


def _write_sizes(config: ModelConfig, *, tied: bool) -> Raw:
    """The keys for layers without a window, as published files have them; per_layer_config if they don't give all sizes.

    tied: True if keys are values. Otherwise, the class ignores the key/value heads of layers without a window.
    """
    attention, layers = config.attention, config.layer_count
    each = [
        {
            "head_dim": kind.head_dim or attention.head_dim,
            "num_key_value_heads": kind.kv_heads or attention.kv_heads,
        }
        for kind in config.layers
    ]
    windowed = tuple(layer for layer, kind in enumerate(config.layers) if kind.window is not None)
    full = next((kind for kind in config.layers if kind.window is None), config.layers[-1])
    short = {_HEAD_DIM: full.head_dim or attention.head_dim, _KV_HEADS: full.kv_heads}
    usual = {"head_dim": attention.head_dim, "num_key_value_heads": attention.kv_heads}
    read_back = _sizes_of_layers({**short, _TIED: tied, "num_hidden_layers": layers}, windowed)
    if each == [usual | read_back.get(str(layer), {}) for layer in range(layers)]:
        return short
    return {_EACH: {str(layer): sizes for layer, sizes in enumerate(each) if sizes != usual}}


def _read_widths(raw: Raw) -> Fields:
    """The widths of the MLPs. With experts, each layer's MLP is a shared expert."""
    width = need_size(raw, _WIDTH, 9216)
    if not raw.get(_MOE[0]):
        return {"mlp.ffn": width}
    if raw.get(_DOUBLE) and raw.get(SHARED_LAYERS):
        raise NotExpressible(f"{CONFIG_NAME}: {_DOUBLE} is not supported with {_MOE[0]}")
    counts = {
        "experts.count": need_size(raw, _MOE[1]),
        "experts.per_token": need_size(raw, _MOE[2]),
    }
    widths = {"experts.ffn": need_size(raw, _MOE[3]), "experts.shared_ffn": width, "mlp.ffn": width}
    return {**counts, **widths, "layers.mlp": "experts", "experts.own_norms": True}


def _write_widths(config: ModelConfig) -> Raw:
    experts = config.experts
    if not experts.count:
        return {_WIDTH: config.mlp.ffn, _MOE[0]: False}
    values = (True, experts.count, experts.per_token, experts.ffn)
    return {_WIDTH: experts.shared_ffn, **dict(zip(_MOE, values, strict=True))}


def _causal(raw: Raw) -> Fields:
    """Check that text attends to earlier tokens only. `vision` concerns the tokens of an image alone."""
    kind = raw.get("use_bidirectional_attention")
    if kind not in (None, "vision"):
        raise NotExpressible(
            f"{CONFIG_NAME}: use_bidirectional_attention {kind!r} is not supported, only null and 'vision' are"
        )
    return {}


EMBEDDING_AND_ACTIVATION = (
    choice(
        "hidden_activation",
        "mlp.activation",
        {"gelu_pytorch_tanh": "gelu_tanh"},
        "gelu_pytorch_tanh",
    ),
    follows("embedding_scale", lambda raw: raw["hidden_size"] ** 0.5),
)
_BODY = decoder_keys(
    positions=131072, kv_heads=4, head_dim=256, rotation=proportional_ropes(theta=1e6, share=0.25, local_theta=1e4),
    tokens=(2, 1, 0), tied=True,
)  # fmt: skip
_KEYS = (
    *without_keys(_BODY, _WIDTH),
    Keys((_WIDTH, *_MOE), _read_widths, _write_widths),
    Keys((_TYPES, _WINDOW, _HEAD_DIM, _KV_HEADS, _EACH, _TIED, SHARED_LAYERS, _DOUBLE), _read_layers, _write_layers),
    LAYER_INPUT_KEYS,
    *EMBEDDING_AND_ACTIVATION,
    maybe_number("final_logit_softcapping", "head.logit_cap", None),
    Keys(("use_bidirectional_attention",), _causal, lambda config: {}),
)  # fmt: skip
NORMED_VALUES = {
    **LLAMA_LIKE,
    "mlp.activation": "gelu_tanh",
    "norm.place": "both",
    "attention.qk_norm": True,
    "attention.v_norm": True,
    "attention.scale": 1.0,
}
"""Fields that Gemma 3n has as well."""

FAMILY = Family(
    name="gemma4_text",
    architectures=("Gemma4ForCausalLM",),
    model_type="gemma4_text",
    rows=ROWS,
    keys=_KEYS,
    fixed={**NORMED_VALUES, "layer_scale": True},
    only={"attention_bias": False},
    ignored=ROPE_FREQUENCIES,
    unused=unused_keys_and_values,
    features=("qk_norm",),
    recognized=None,
    proven="names",
)
