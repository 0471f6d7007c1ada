"""Reflection's Beam: norms before and after sublayers, gated attention, residuals weighted by depth, experts as DeepSeek's.

    model.layers.{l}.self_attn.gate_bias    a number for each head, which is added to the gate of attention

Layers without a window have no rope. Their queries grow with a power of the position. Megatron core has no such gates and
residuals: these models are converted between Hugging Face's files, and trained. Source: BeamConfig and modeling_beam.py of
transformers 5.24.
"""

from dataclasses import replace

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_MLPS,
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
    sigmoid_routing,
)
from megaconv.families.parts.delta_net import GATED_ATTENTION
from megaconv.families.parts.keys import Fields, Raw, maybe_number
from megaconv.families.parts.norm_places import norms_at, output_norms_by_mlp
from megaconv.families.parts.ropes_or_none import ropes_or_none
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.families.parts.windows import windows_but_every, windows_by_layer
from megaconv.model.table import Row

_GATE_BIAS = Row(
    "layers.{l}.attn.gate_bias", ("heads",), tp=0, when="gate_bias",
    hf="model.layers.{l}.self_attn.gate_bias",
    core="decoder.layers.{l}.self_attention.gate_bias",
)  # fmt: skip
_NAMES = {
    "layers.{l}.attn.{q|gate|k|v}.weight": {
        "hf": "model.layers.{l}.self_attn.{q_proj|gate_proj|k_proj|v_proj}.weight"
    },
}
_LAYERS = norms_at(
    (*GATED_ATTENTION, _GATE_BIAS),
    DEEPSEEK_MLPS,
    before=("input_layernorm", "pre_feedforward_layernorm"),
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
)
ROWS = in_core(respelled(output_norms_by_mlp((EMBEDDING, *_LAYERS, *HEAD)), _NAMES))

_THETA, _TYPES = 10000.0, "layer_types"
_WINDOWS = windows_by_layer(512, full_every=6)


def _read_windows(raw: Raw) -> Fields:
    """The window of each layer. Without layer_types, every sixth layer has none, and the last one has none."""
    usual = [*windows_but_every(6, raw)[:-1], "full_attention"]
    return _WINDOWS.read({**raw, _TYPES: raw.get(_TYPES) or usual})


_ROPES = {"sliding_attention": {"rope_theta": _THETA}, "full_attention": None}
_KEYS = (
    *decoder_keys(
        positions=8192,
        kv_heads=8,
        head_dim=128,
        ffn=20480,
        rotation=ropes_or_none(_THETA, replace(_WINDOWS, read=_read_windows), _ROPES),
    ),
    *routed_experts(count=256, width=2560, count_key="num_experts"),
    mlp_layer_types(dense=3),
    *sigmoid_routing(scale=2.5, groups=8, group_topk=4),
    maybe_number("final_logit_softcapping", "head.logit_cap", 30.0),
)
_POWER = {
    "temperature.scale": 0.1,
    "temperature.interval": 2048,
    "temperature.offset": 1,
    "temperature.power": True,
}
"""The factor on queries of layers without rope."""
_FIXED = {
    **LLAMA_LIKE,
    **SIGMOID_ROUTER,
    **_POWER,
    "attention.qk_norm": True,
    "attention.output_gate": True,
    "attention.gate_bias": True,
    "norm.place": "both",
    "residual_by_depth": True,
}

FAMILY = Family(
    name="beam",
    architectures=("BeamForCausalLM",),
    model_type="beam",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={**SILU, "attention_bias": False},
    recognized=None,
    proven="names",
    numbered="the weights of sums",
)
