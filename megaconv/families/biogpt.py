"""BioGPT: as OPT, with a scaled embedding and exact gelu."""

from dataclasses import replace

from megaconv.families.opt import FAMILY as OPT
from megaconv.families.opt import FIXED, MODULES
from megaconv.families.parts.decoder_keys import ALL_BIASES, GELUS, model_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import Fields, Keys, Raw, choice, need_flag, need_size, size
from megaconv.families.parts.row_changes import (
    in_core,
    with_modules,
    with_norm_biases,
    with_positions,
    without_gate,
)

_OWN_MODULES = {
    "model.embed_tokens": "biogpt.embed_tokens",
    "model.layers": "biogpt.layers",
    "model.norm": "biogpt.layer_norm",
    "lm_head": "output_projection",
}
_LAYERS = with_modules(with_norm_biases(without_gate(LLAMA_ROWS)), MODULES | _OWN_MODULES)
ROWS = in_core(with_positions(_LAYERS, "biogpt.embed_positions"))

_SCALES = "scale_embedding"


def _read_scale(raw: Raw) -> Fields:
    scaled = need_flag(raw, _SCALES, True)
    return {"embedding_scale": need_size(raw, "hidden_size") ** 0.5 if scaled else None}


_KEYS = (
    size("hidden_size", "hidden"),
    size("num_hidden_layers", "layers.count"),
    size("intermediate_size", "mlp.ffn"),
    size("max_position_embeddings", "max_positions", 1024),
    multi_head("num_attention_heads", "hidden_size"),
    Keys((_SCALES,), _read_scale, lambda config: {_SCALES: config.embedding_scale is not None}),
    Keys(("layer_norm_eps",), lambda raw: {}, lambda config: {}),
    choice("hidden_act", "mlp.activation", GELUS, "gelu"),
    *model_keys(tied=True, tokens=(0, 2, 1)),
)
"""transformers doesn't read layer_norm_eps: its epsilon is always 1e-5."""

FAMILY = replace(
    OPT, name="biogpt", architectures=("BioGptForCausalLM",), model_type="biogpt", rows=ROWS, keys=_KEYS,
    fixed={**FIXED, **ALL_BIASES}, only={}, prefix="biogpt.",
)  # fmt: skip
