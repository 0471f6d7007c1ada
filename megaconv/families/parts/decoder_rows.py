"""Rows of a decoder as Llama has it: embedding, attention, MLP, final norm and head.

    hf       model.embed_tokens, model.layers.{l}.{input_layernorm, self_attn, post_attention_layernorm, mlp}, model.norm, lm_head
    core     embedding, decoder.layers.{l}.{self_attention, mlp}, decoder.final_layernorm, output_layer
    legacy   language_model.{embedding, encoder.layers.{l}, encoder.final_norm, output_layer}
    meta     tok_embeddings, layers.{l}.{attention_norm, attention, ffn_norm, feed_forward}, norm, output

Nearly all families take these rows, and change or replace some of them.
"""

from megaconv.model.table import Copied, Fused, FusedPairs, OtherAxis, RotaryPairs, Row

_HF = "model.layers.{l}."
_CORE = "decoder.layers.{l}."
_LEGACY = "language_model.encoder.layers.{l}."
_META = "layers.{l}."

EMBEDDING = Row(
    "embed.weight", ("vocab hidden",), tp=0, stage="first", padded_vocab=True,
    hf="model.embed_tokens.weight",
    core="embedding.word_embeddings.weight",
    legacy="language_model.embedding.word_embeddings.weight",
    meta=OtherAxis("tok_embeddings.weight", tp=1),
    meta_rows="tok_embeddings.weight",
    copies=(Copied("head", {"hf": ("lm_head.weight",), "core": ("output_layer.weight",), "meta": ("output.weight",),
                            "legacy": ("word_embeddings_for_head.weight",)}),),
)  # fmt: skip

ATTENTION = (
    Row("layers.{l}.input_norm.weight", ("hidden",),
        hf=_HF + "input_layernorm.weight",
        core=_CORE + "self_attention.linear_qkv.layer_norm_weight",
        core_local=_CORE + "input_layernorm.weight",
        legacy=_LEGACY + "input_norm.weight",
        meta=_META + "attention_norm.weight"),
    Row("layers.{l}.attn.{q|k|v}.weight", ("heads*head_dim hidden", "kv_heads*head_dim hidden", "kv_heads*head_dim hidden"), tp=0,
        hf=_HF + "self_attn.{q|k|v}_proj.weight",
        core=Fused(_CORE + "self_attention.linear_qkv.weight", groups="kv_heads"),
        legacy=Fused(_LEGACY + "self_attention.query_key_value.weight", groups="kv_heads"),
        meta=RotaryPairs(_META + "attention.{wq|wk|wv}.weight", rotating=(0, 1)),
        meta_fused=FusedPairs(_META + "attention.wqkv.weight", groups="kv_heads", rotating=(0, 1))),
    Row("layers.{l}.attn.{q|k|v}.bias", ("heads*head_dim", "kv_heads*head_dim", "kv_heads*head_dim"), tp=0, when="qkv_bias",
        hf=_HF + "self_attn.{q|k|v}_proj.bias",
        core=Fused(_CORE + "self_attention.linear_qkv.bias", groups="kv_heads"),
        legacy=Fused(_LEGACY + "self_attention.query_key_value.bias", groups="kv_heads")),
    Row("layers.{l}.attn.{q|k}_norm.weight", ("head_dim", "head_dim"), when="qk_norm",
        hf=_HF + "self_attn.{q|k}_norm.weight",
        core=_CORE + "self_attention.{q|k}_layernorm.weight"),
    Row("layers.{l}.attn.o.weight", ("hidden heads*head_dim",), tp=1,
        hf=_HF + "self_attn.o_proj.weight",
        core=_CORE + "self_attention.linear_proj.weight",
        legacy=_LEGACY + "self_attention.dense.weight",
        meta=_META + "attention.wo.weight"),
    Row("layers.{l}.attn.o.bias", ("hidden",), when="o_bias",
        hf=_HF + "self_attn.o_proj.bias",
        core=_CORE + "self_attention.linear_proj.bias",
        legacy=_LEGACY + "self_attention.dense.bias"),
)  # fmt: skip

SINKS = Row(
    "layers.{l}.attn.sinks", ("heads",), tp=0,
    hf=_HF + "self_attn.sinks",
    core=_CORE + "self_attention.core_attention.softmax_offset",
)  # fmt: skip
"""Attention sinks, which only some architectures have."""

MLP = (
    Row("layers.{l}.mlp_norm.weight", ("hidden",), when="dense",
        hf=_HF + "post_attention_layernorm.weight",
        core=_CORE + "mlp.linear_fc1.layer_norm_weight",
        core_local=_CORE + "pre_mlp_layernorm.weight",
        legacy=_LEGACY + "post_attention_norm.weight",
        meta=_META + "ffn_norm.weight"),
    Row("layers.{l}.mlp.{gate|up}.weight", ("ffn hidden", "ffn hidden"), tp=0, when="dense",
        hf=_HF + "mlp.{gate|up}_proj.weight",
        core=Fused(_CORE + "mlp.linear_fc1.weight"),
        legacy=Fused(_LEGACY + "mlp.dense_h_to_4h.weight"),
        meta=_META + "feed_forward.{w1|w3}.weight"),
    Row("layers.{l}.mlp.{gate|up}.bias", ("ffn", "ffn"), tp=0, when="dense mlp_bias",
        hf=_HF + "mlp.{gate|up}_proj.bias",
        core=Fused(_CORE + "mlp.linear_fc1.bias"),
        legacy=Fused(_LEGACY + "mlp.dense_h_to_4h.bias")),
    Row("layers.{l}.mlp.down.weight", ("hidden ffn",), tp=1, when="dense",
        hf=_HF + "mlp.down_proj.weight",
        core=_CORE + "mlp.linear_fc2.weight",
        legacy=_LEGACY + "mlp.dense_4h_to_h.weight",
        meta=_META + "feed_forward.w2.weight"),
    Row("layers.{l}.mlp.down.bias", ("hidden",), when="dense mlp_bias",
        hf=_HF + "mlp.down_proj.bias",
        core=_CORE + "mlp.linear_fc2.bias",
        legacy=_LEGACY + "mlp.dense_4h_to_h.bias"),
)  # fmt: skip

HEAD = (
    Row("final_norm.weight", ("hidden",), stage="last",
        hf="model.norm.weight",
        core="decoder.final_layernorm.weight",
        legacy="language_model.encoder.final_norm.weight",
        meta="norm.weight"),
    Row("head.weight", ("vocab hidden",), tp=0, stage="last", when="untied", padded_vocab=True,
        hf="lm_head.weight",
        core="output_layer.weight",
        legacy="language_model.output_layer.weight",
        meta="output.weight"),
)  # fmt: skip

LLAMA_ROWS = (EMBEDDING, *ATTENTION, *MLP, *HEAD)
"""The whole table of a Llama."""
ROPE_FREQUENCIES = (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"(layers\.\d+\.attention\.inner_attention\.)?rope\.freqs",
)
"""Rotary frequencies, which older transformers and Meta saved. They follow from the configuration."""
