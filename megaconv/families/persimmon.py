"""Persimmon: LayerNorm, also on q and k, with biases everywhere but in the head; squared ReLU; rope on half of each head.

Megatron core's norms of q and k follow the same kind, but no family of its checkpoints has their biases: these models are
converted between Hugging Face's files, and trained.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ALL_BIASES,
    LAYER_NORM,
    SQUARED_RELU,
    body_keys,
    multi_head,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import flags
from megaconv.families.parts.norm_places import QK_NORM_BIASES
from megaconv.families.parts.rope import partial_rotation
from megaconv.families.parts.row_changes import (
    in_core,
    respelled,
    with_modules,
    with_norm_biases,
    without_gate,
)
from megaconv.model.table import Fused

_QKV = "model.layers.{l}.self_attn.query_key_value."
_FUSED = {
    f"layers.{{l}}.attn.{{q|k|v}}.{kind}": {"hf": Fused(_QKV + kind, groups="kv_heads")}
    for kind in ("weight", "bias")
}
_MODULES = {
    "self_attn.o_proj": "self_attn.dense",
    "self_attn.{q|k}_norm": "self_attn.{q|k}_layernorm",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "model.norm": "model.final_layernorm",
}
_ALL = (*respelled(with_norm_biases(without_gate(LLAMA_ROWS)), _FUSED), QK_NORM_BIASES)
ROWS = in_core(with_modules(_ALL, _MODULES))

_KEYS = (
    *body_keys(
        positions=16384,
        epsilon=1e-5,
        epsilon_key="layer_norm_eps",
        partial=partial_rotation(0.5),
        tokens=(1, 2, None),
    ),
    multi_head("num_attention_heads", "hidden_size"),
    flags("qk_layernorm", ("attention.qk_norm", "attention.qk_norm_bias"), default=True),
)

FAMILY = Family(
    name="persimmon",
    architectures=("PersimmonForCausalLM",),
    model_type="persimmon",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LAYER_NORM, **ALL_BIASES, **SQUARED_RELU},
    only={"hidden_act": "relu2"},
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
