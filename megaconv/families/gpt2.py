"""GPT-2: learned positions, LayerNorm, biases everywhere, weights stored as [in, out], head tied to the embedding."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ALL_BIASES,
    GELUS,
    LEARNED_POSITIONS,
    model_keys,
    multi_head,
)
from megaconv.families.parts.keys import Keys, Raw, choice, need_size, number, size
from megaconv.model.config import ModelConfig
from megaconv.model.table import Copied, Fused, Row, Transposed

_HF = "transformer.h.{l}."
_CORE = "decoder.layers.{l}."
_LEGACY = "language_model.encoder.layers.{l}."
_HEADS = "heads*head_dim"

ROWS = (
    Row("embed.weight", ("vocab hidden",), tp=0, stage="first", padded_vocab=True,
        hf="transformer.wte.weight",
        core="embedding.word_embeddings.weight",
        legacy="language_model.embedding.word_embeddings.weight",
        copies=(Copied("head", {"hf": ("lm_head.weight",), "core": ("output_layer.weight",),
                                "legacy": ("word_embeddings_for_head.weight",)}),)),
    Row("positions.weight", ("max_positions hidden",), stage="first",
        hf="transformer.wpe.weight",
        core="embedding.position_embeddings.weight",
        legacy="language_model.embedding.position_embeddings.weight"),
    Row("layers.{l}.input_norm.{weight|bias}", ("hidden", "hidden"),
        hf=_HF + "ln_1.{weight|bias}",
        core=_CORE + "self_attention.linear_qkv.layer_norm_{weight|bias}",
        core_local=_CORE + "input_layernorm.{weight|bias}",
        legacy=_LEGACY + "input_norm.{weight|bias}"),
    Row("layers.{l}.attn.{q|k|v}.weight", (f"{_HEADS} hidden",) * 3, tp=0,
        hf=Transposed(_HF + "attn.c_attn.weight"),
        core=Fused(_CORE + "self_attention.linear_qkv.weight", groups="kv_heads"),
        legacy=Fused(_LEGACY + "self_attention.query_key_value.weight", groups="kv_heads")),
    Row("layers.{l}.attn.{q|k|v}.bias", (_HEADS,) * 3, tp=0,
        hf=Fused(_HF + "attn.c_attn.bias"),
        core=Fused(_CORE + "self_attention.linear_qkv.bias", groups="kv_heads"),
        legacy=Fused(_LEGACY + "self_attention.query_key_value.bias", groups="kv_heads")),
    Row("layers.{l}.attn.o.weight", (f"hidden {_HEADS}",), tp=1,
        hf=Transposed(_HF + "attn.c_proj.weight"),
        core=_CORE + "self_attention.linear_proj.weight",
        legacy=_LEGACY + "self_attention.dense.weight"),
    Row("layers.{l}.attn.o.bias", ("hidden",),
        hf=_HF + "attn.c_proj.bias",
        core=_CORE + "self_attention.linear_proj.bias",
        legacy=_LEGACY + "self_attention.dense.bias"),
    Row("layers.{l}.mlp_norm.{weight|bias}", ("hidden", "hidden"),
        hf=_HF + "ln_2.{weight|bias}",
        core=_CORE + "mlp.linear_fc1.layer_norm_{weight|bias}",
        core_local=_CORE + "pre_mlp_layernorm.{weight|bias}",
        legacy=_LEGACY + "post_attention_norm.{weight|bias}"),
    Row("layers.{l}.mlp.up.weight", ("ffn hidden",), tp=0,
        hf=Transposed(_HF + "mlp.c_fc.weight"),
        core=_CORE + "mlp.linear_fc1.weight",
        legacy=_LEGACY + "mlp.dense_h_to_4h.weight"),
    Row("layers.{l}.mlp.up.bias", ("ffn",), tp=0,
        hf=_HF + "mlp.c_fc.bias",
        core=_CORE + "mlp.linear_fc1.bias",
        legacy=_LEGACY + "mlp.dense_h_to_4h.bias"),
    Row("layers.{l}.mlp.down.weight", ("hidden ffn",), tp=1,
        hf=Transposed(_HF + "mlp.c_proj.weight"),
        core=_CORE + "mlp.linear_fc2.weight",
        legacy=_LEGACY + "mlp.dense_4h_to_h.weight"),
    Row("layers.{l}.mlp.down.bias", ("hidden",),
        hf=_HF + "mlp.c_proj.bias",
        core=_CORE + "mlp.linear_fc2.bias",
        legacy=_LEGACY + "mlp.dense_4h_to_h.bias"),
    Row("final_norm.{weight|bias}", ("hidden", "hidden"), stage="last",
        hf="transformer.ln_f.{weight|bias}",
        core="decoder.final_layernorm.{weight|bias}",
        legacy="language_model.encoder.final_norm.{weight|bias}"),
    Row("head.weight", ("vocab hidden",), tp=0, stage="last", when="untied", padded_vocab=True,
        hf="lm_head.weight",
        core="output_layer.weight",
        legacy="language_model.output_layer.weight"),
)  # fmt: skip
IGNORED = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)
"""Older files store the causal mask."""


def _write_width(config: ModelConfig) -> Raw:
    return {"n_inner": None if config.mlp.ffn == 4 * config.hidden else config.mlp.ffn}


WIDTH = Keys(
    ("n_inner",),
    lambda raw: {"mlp.ffn": raw.get("n_inner") or 4 * need_size(raw, "n_embd")},
    _write_width,
)
"""The width of the MLP; four times the hidden size if it is missing or null."""
_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_KEYS = (
    size("n_embd", "hidden"),
    size("n_layer", "layers.count"),
    size("n_positions", "max_positions", 1024),
    multi_head("n_head", "n_embd"),
    WIDTH,
    number("layer_norm_epsilon", "norm.epsilon", 1e-5),
    choice("activation_function", "mlp.activation", GELUS, "gelu_new"),
    *model_keys(tied=True, tokens=(50256, 50256, None)),
)
_ONLY = {
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "add_cross_attention": False,
}

FAMILY = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    model_type="gpt2",
    rows=ROWS,
    keys=_KEYS,
    fixed=LEARNED_POSITIONS | ALL_BIASES,
    only=_ONLY,
    aliases=_ALIASES,
    ignored=IGNORED,
    prefix="transformer.",
    recognized="learned norm_bias !gated !encoder !both_ways !mixture",
)
