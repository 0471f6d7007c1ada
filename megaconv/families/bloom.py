"""BLOOM: ALiBi in place of positions, a LayerNorm after the embedding, biases everywhere.

Megatron core has no ALiBi: these models are converted between Hugging Face's files, and trained.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import ALL_BIASES, model_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import Raw, follows, need_size, number, size
from megaconv.families.parts.row_changes import (
    in_core,
    respelled,
    with_embedding_norm,
    with_modules,
    with_norm_biases,
    without_gate,
)
from megaconv.model.table import Fused

_QKV = "transformer.h.{l}.self_attention.query_key_value."
_FUSED = {
    f"layers.{{l}}.attn.{{q|k|v}}.{kind}": {"hf": Fused(_QKV + kind, groups="kv_heads")}
    for kind in ("weight", "bias")
}
_MODULES = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.layers.{l}": "transformer.h.{l}",
    "self_attn.": "self_attention.",
    "o_proj": "dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "model.norm": "transformer.ln_f",
}
_LAYERS = with_modules(respelled(with_norm_biases(without_gate(LLAMA_ROWS)), _FUSED), _MODULES)
ROWS = in_core(with_embedding_norm(_LAYERS, "transformer.word_embeddings_layernorm"))


def _width(raw: Raw) -> int:
    return 4 * need_size(raw, "hidden_size", 64)


_KEYS = (
    size("hidden_size", "hidden", 64),
    size("n_layer", "layers.count", 2),
    size("seq_length", "max_positions", 2048),
    follows("mlp.ffn", _width),
    multi_head("n_head", "hidden_size"),
    number("layer_norm_epsilon", "norm.epsilon", 1e-5),
    *model_keys(tied=True, tokens=(1, 2, None)),
)
_FIXED = {
    **ALL_BIASES,
    "positions.kind": "alibi",
    "norm.kind": "LayerNorm",
    "norm.embedding": True,
    "mlp.activation": "gelu_tanh",
    "mlp.gated": False,
}
_ALIASES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"}

FAMILY = Family(
    "bloom", ("BloomForCausalLM",), "bloom", ROWS, keys=_KEYS, fixed=_FIXED,
    only={"apply_residual_connection_post_layernorm": False}, aliases=_ALIASES, prefix="transformer.", recognized=None,
    proven="names",
)  # fmt: skip
