"""Xiaomi's MiMo V2 Flash: layers with a window have twice as many key/value heads, and sinks; values have a width of
their own.

Published files describe the layers in keys that transformers' class doesn't read. They have to agree with the keys that
it reads. Layers for multi-token prediction are left out. Megatron core has no such layers: these models are converted
between Hugging Face's files, and trained; core's names are those of the trainer's checkpoints.
"""

from dataclasses import replace
from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    MLP,
    ROPE_FREQUENCIES,
    SINKS,
)
from megaconv.families.parts.deepseek_experts import (
    ROUTER_BIAS,
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
    sigmoid_routing,
)
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    flags,
    maybe_number,
    need_size,
)
from megaconv.families.parts.layer_ropes import partial_layer_ropes
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import layer_types, windowed_layers, windows_on
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Row

_Q, _K, _V = "heads*head_dim", "kv_heads*head_dim", "kv_heads*attn_v_dim"
_SHAPES = {
    "layers.{l}.attn.{q|k|v}.weight": (f"{_Q} hidden", f"{_K} hidden", f"{_V} hidden"),
    "layers.{l}.attn.{q|k|v}.bias": (_Q, _K, _V),
    "layers.{l}.attn.o.weight": ("hidden heads*attn_v_dim",),
}
_SINKS = replace(SINKS, when="sinks_here").renamed(
    hf="model.layers.{l}.self_attn.attention_sink_bias",
    hf_stacked="model.layers.{l}.self_attn.sinks",
)


def _with_own_values(row: Row) -> Row:
    """The row with the width that values have."""
    return replace(row, shapes=_SHAPES.get(row.canonical, row.shapes))


_LAYERS = (*map(_with_own_values, ATTENTION), _SINKS, MOE_NORM, *MLP, *QWEN_EXPERTS, ROUTER_BIAS)
ROWS = in_core((EMBEDDING, *_LAYERS, *HEAD))

_WINDOW, _OLDER_WINDOW, _GROUPS = "sliding_window", "sliding_window_size", "num_key_value_heads"


def _usual_layers(raw: Raw) -> list[str]:
    """The layer_types if the key is missing: full attention in the first layer and in every sixth."""
    layers = need_size(raw, "num_hidden_layers")
    full = {0, *range(5, layers, 6)}
    return ["full_attention" if layer in full else "sliding_attention" for layer in range(layers)]


def _read_layers(raw: Raw) -> Fields:
    """The windows of the layers, and their key/value heads. The older key doesn't count a token itself."""
    layers, windowed = need_size(raw, "num_hidden_layers"), windowed_layers(raw, _usual_layers(raw))
    older, groups = raw.get(_OLDER_WINDOW), need_size(raw, _GROUPS, 4)
    width = need_size(raw, _WINDOW, 129) if older is None else need_size(raw, _OLDER_WINDOW) + 1
    heads = need_size(raw, "num_attention_heads")
    if windowed and heads % (2 * groups):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: num_attention_heads {heads} is not a multiple of {2 * groups}, the key/value heads of layers with a window"
        )
    return {
        **windows_on(raw, windowed, width),
        "layers.kv_heads": per_layer(windowed, layers, 2 * groups, None),
    }


def _write_layers(config: ModelConfig) -> Raw:
    return {_WINDOW: config.window or 129, "layer_types": layer_types(config)}


_V_DIM = "v_head_dim"


def _read_v_dim(raw: Raw) -> Fields:
    width = need_size(raw, _V_DIM, 128)
    return {"attention.v_dim": None if width == need_size(raw, "head_dim", 192) else width}


def _write_v_dim(config: ModelConfig) -> Raw:
    attention = config.attention
    return {_V_DIM: attention.v_dim or attention.head_dim}


_SHARE = 0.334
_ROPES = partial_layer_ropes((5e6, _SHARE), (1e4, _SHARE), missing_share=_SHARE)
_MLPS = mlp_layer_types(dense=1)


def _stated_twice(raw: Raw) -> dict[str, Any]:
    """Keys of published files -> the values that follow from the keys of transformers' class."""
    layers, ropes = need_size(raw, "num_hidden_layers"), _ROPES.read(raw)
    windowed, mlps = windowed_layers(raw, _usual_layers(raw)), _MLPS.read(raw)["layers.mlp"]
    each = mlps if isinstance(mlps, tuple) else (mlps,) * layers
    return {
        "hybrid_layer_pattern": [int(layer in windowed) for layer in range(layers)],
        "moe_layer_freq": [int(mlp == "experts") for mlp in each],
        "layernorm_epsilon": raw.get("rms_norm_eps", 1e-5),
        "rope_theta": ropes["positions.theta"],
        "swa_rope_theta": ropes["positions.local_theta"],
        "partial_rotary_factor": ropes["positions.rotary_percent"],
        "swa_num_attention_heads": raw.get("num_attention_heads"),
        "swa_num_key_value_heads": 2 * need_size(raw, _GROUPS, 4),
        "swa_head_dim": raw.get("head_dim", 192),
        "swa_v_head_dim": raw.get(_V_DIM, 128),
    }


_OLDER = (
    "hybrid_layer_pattern", "moe_layer_freq", "layernorm_epsilon", "rope_theta", "swa_rope_theta", "partial_rotary_factor",
    "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim",
)  # fmt: skip


def _require_same(raw: Raw) -> Fields:
    for key, value in _stated_twice(raw).items():
        if raw.get(key) is not None and raw[key] != value:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {key} is {raw[key]!r}, but the keys that transformers' class reads give {value!r}"
            )
    return {}


_KEYS = (
    *without_keys(
        decoder_keys(positions=131072, kv_heads=4, head_dim=192, epsilon=1e-5, rotation=_ROPES, tokens=(1, None, None)),
        "partial_rotary_factor",
    ),
    Keys((_WINDOW, _OLDER_WINDOW, "layer_types"), _read_layers, _write_layers),
    Keys((_V_DIM,), _read_v_dim, _write_v_dim),
    _MLPS,
    *routed_experts(count=256, width=2048),
    *sigmoid_routing(scale=1.0, groups=1, group_topk=1),
    flags("attention_bias", ("attention.qkv_bias",), default=False),
    maybe_number("attention_value_scale", "attention.value_scale", 0.707),
    Keys(_OLDER, _require_same, lambda config: {}),
)  # fmt: skip
_ONLY = {
    **SILU,
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_shared_experts": None,
}
_FIXED = {
    **LLAMA_LIKE,
    **SIGMOID_ROUTER,
    "attention.sinks": True,
    "attention.sinks_in_windows": True,
}

FAMILY = Family(
    name="mimo_v2_flash",
    architectures=("MiMoV2FlashForCausalLM",),
    model_type="mimo_v2_flash",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    left_out=MTP_LEFT_OUT,
    recognized=None,
    proven="names",
    aliases={"num_local_experts": "n_routed_experts"},
)
