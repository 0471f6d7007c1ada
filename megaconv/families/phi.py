"""Phi 1, 1.5 and 2: one LayerNorm before attention and the MLP, which work in parallel; biases everywhere, also in the head.

Megatron core has no such layer: these models are converted between Hugging Face's files, and trained.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ALL_BIASES,
    GELUS,
    LAYER_NORM,
    PARALLEL,
    body_keys,
    heads,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import choice, flags
from megaconv.families.parts.norm_places import QK_NORM_BIASES
from megaconv.families.parts.rope import partial_rotation
from megaconv.families.parts.row_changes import (
    in_core,
    with_head_bias,
    with_modules,
    with_norm_biases,
    with_shared_norm,
    without_gate,
)

_MODULES = {
    "self_attn.o_proj": "self_attn.dense",
    "self_attn.{q|k}_norm": "self_attn.{q|k}_layernorm",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "model.norm": "model.final_layernorm",
}
_LAYER_NORMS = with_shared_norm(with_norm_biases(without_gate(LLAMA_ROWS)))
ROWS = in_core(with_modules(with_head_bias((*_LAYER_NORMS, QK_NORM_BIASES)), _MODULES))

_KEYS = (
    *body_keys(
        positions=2048,
        epsilon=1e-5,
        epsilon_key="layer_norm_eps",
        partial=partial_rotation(0.5),
        tokens=(1, 2, None),
    ),
    heads(None, own_size=False),
    choice("hidden_act", "mlp.activation", GELUS, "gelu_new"),
    flags("qk_layernorm", ("attention.qk_norm", "attention.qk_norm_bias"), default=False),
)
_FIXED = {**LAYER_NORM, **ALL_BIASES, **PARALLEL, "mlp.gated": False, "head.bias": True}

FAMILY = Family(
    name="phi",
    architectures=("PhiForCausalLM",),
    model_type="phi",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    ignored=ROPE_FREQUENCIES,
    recognized=None,
    proven="names",
)
