"""Poolside's Laguna: numbers of heads by layer, gated attention, ropes of two kinds of layers, experts as DeepSeek's.

The gate of attention is a softplus, of each head or of each element. Megatron core has no such gate, and no layers with
other numbers of heads: these models are converted between Hugging Face's files, and trained; core's names are those of
the trainer's checkpoints.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.attention_gates import with_gates
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys, heads
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_MLPS,
    ROUTER_BIAS,
    SIGMOID_ROUTER,
    mlp_layer_types,
)
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    need_size,
    number,
    require_each_layer,
    size,
)
from megaconv.families.parts.layer_ropes import partial_layer_ropes
from megaconv.families.parts.row_changes import in_core, respelled, without_biases
from megaconv.families.parts.windows import windows_by_layer
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each

_MLP = "model.layers.{l}.mlp."
_NAMES = {
    ROUTER_BIAS.canonical: {
        "hf": _MLP + "experts.e_score_correction_bias",
        "hf_stacked": _MLP + "gate.e_score_correction_bias",
    },
    "layers.{l}.mlp.shared.{gate|up}.weight": {
        "hf": _MLP + "shared_expert.{gate_proj|up_proj}.weight",
        "hf_stacked": _MLP + "shared_experts.{gate_proj|up_proj}.weight",
    },
    "layers.{l}.mlp.shared.down.weight": {
        "hf": _MLP + "shared_expert.down_proj.weight",
        "hf_stacked": _MLP + "shared_experts.down_proj.weight",
    },
}
_ATTENTION = with_gates(without_biases(ATTENTION), "g_proj", "gate", "head_gate")
ROWS = in_core(respelled((EMBEDDING, *_ATTENTION, *DEEPSEEK_MLPS, *HEAD), _NAMES))

_USUAL_HEADS = heads(8, 128)
_EACH = "num_attention_heads_per_layer"


def _read_heads(raw: Raw) -> Fields:
    """The heads of attention. A layer may have another number than the model."""
    found = _USUAL_HEADS.read(raw)
    usual, groups = found["attention.heads"], found["attention.kv_heads"]
    layers = need_size(raw, "num_hidden_layers")
    listed: Any = raw.get(_EACH) or [usual] * layers
    require_each_layer(_EACH, listed, layers)
    for count in listed:
        if type(count) is not int or count < 1 or count % groups:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {_EACH} has {count!r}; expected a multiple of num_key_value_heads {groups}"
            )
    own = tuple(None if count == usual else count for count in listed)
    return {**found, "layers.heads": one_or_each(own)}


def _write_heads(config: ModelConfig) -> Raw:
    usual = config.attention.heads
    return {**_USUAL_HEADS.write(config), _EACH: [kind.heads or usual for kind in config.layers]}


_OF_HEADS = {True: True, "per-head": True, "per-element": False}
_GATING = choice("gating", "attention.head_gate", _OF_HEADS, True)


def _read_gate(raw: Raw) -> Fields:
    found = _GATING.read(raw)
    return {**found, "attention.output_gate": not found["attention.head_gate"]}


_ROPES = partial_layer_ropes((500000.0, 0.5), (10000.0, 1.0), missing_share=1.0)
_BODY = decoder_keys(positions=131072, ffn=8192, rotation=_ROPES)
_KEYS = (
    *without_keys(_BODY, "partial_rotary_factor", "num_attention_heads"),
    Keys((*_USUAL_HEADS.names, _EACH), _read_heads, _write_heads),
    windows_by_layer(512, full_every=1),
    mlp_layer_types(dense=1),
    size("num_experts", "experts.count", 256),
    size("num_experts_per_tok", "experts.per_token", 8),
    size("moe_intermediate_size", "experts.ffn", 512),
    size("shared_expert_intermediate_size", "experts.shared_ffn", 512),
    number("moe_routed_scaling_factor", "experts.scale", 1.0),
    Keys(("gating",), _read_gate, _GATING.write),
)
_ONLY = {
    **SILU,
    "attention_bias": False,
    "moe_apply_router_weight_on_input": False,
    "moe_router_logit_softcapping": 0.0,
    "norm_topk_prob": True,
}
_FIXED = {
    **LLAMA_LIKE,
    **SIGMOID_ROUTER,
    "attention.qk_norm": True,
    "attention.gate_activation": "softplus",
}

FAMILY = Family(
    name="laguna",
    architectures=("LagunaForCausalLM",),
    model_type="laguna",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=None,
    proven="names",
)
