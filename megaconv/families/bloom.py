"""BLOOM: ALiBi in place of positions, a LayerNorm after the embedding, biases everywhere.

Megatron core has no ALiBi: these models are converted between Hugging Face's files, and trained.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import ALL_BIASES, model_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size, number, size
from megaconv.families.parts.row_changes import (
    in_core,
    respelled,
    with_embedding_norm,
    with_modules,
    with_norm_biases,
    without_gate,
)
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused

_QKV = "transformer.h.{l}.self_attention.query_key_value."
FUSED = {
    f"layers.{{l}}.attn.{{q|k|v}}.{kind}": {"hf": Fused(_QKV + kind, groups="kv_heads")}
    for kind in ("weight", "bias")
}
"""Hugging Face's names of q, k and v."""
MODULES = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.layers.{l}": "transformer.h.{l}",
    "self_attn.": "self_attention.",
    "o_proj": "dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "model.norm": "transformer.ln_f",
}
"""Hugging Face's names of modules. Falcon's are the same."""
_LAYERS = with_modules(respelled(with_norm_biases(without_gate(LLAMA_ROWS)), FUSED), MODULES)
ROWS = in_core(with_embedding_norm(_LAYERS, "transformer.word_embeddings_layernorm"))


_HIDDEN, _OLDER = "hidden_size", "n_embed"
_HEADS = multi_head("n_head", _HIDDEN)


def _read_sizes(raw: Raw) -> Fields:
    """The sizes that the hidden size decides. Published files have an older name of it, which takes precedence."""
    hidden = need_size(raw, _HIDDEN if raw.get(_OLDER) is None else _OLDER, 64)
    return {"hidden": hidden, "mlp.ffn": 4 * hidden, **_HEADS.read({**raw, _HIDDEN: hidden})}


def _write_sizes(config: ModelConfig) -> Raw:
    return {_HIDDEN: config.hidden, **_HEADS.write(config)}


_KEYS = (
    Keys((_HIDDEN, _OLDER, *_HEADS.names), _read_sizes, _write_sizes),
    size("n_layer", "layers.count", 2),
    size("seq_length", "max_positions", 2048),
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
_ALIASES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}

FAMILY = Family(
    name="bloom",
    architectures=("BloomForCausalLM",),
    model_type="bloom",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={"apply_residual_connection_post_layernorm": False},
    aliases=_ALIASES,
    prefix="transformer.",
    recognized=None,
    proven="names",
)
