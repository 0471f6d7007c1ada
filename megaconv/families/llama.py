"""Llama 1, 2, 3, 3.1, 3.2, 3.3 and everything else that calls itself LlamaForCausalLM."""

from collections.abc import Mapping
from typing import Any

from megaconv.config import ModelConfig
from megaconv.families import Family
from megaconv.hf_config import read_decoder, refuse, write_decoder
from megaconv.table import Fused, Row

_HF = "model.layers.{l}."
_CORE = "decoder.layers.{l}."

EMBEDDING = Row(
    "embed.weight", ("vocab hidden",), tp=0, stage="first", padded_vocab=True,
    hf="model.embed_tokens.weight",
    core="embedding.word_embeddings.weight",
    tied_copy={"hf": "lm_head.weight", "core": "output_layer.weight", "core_local": "output_layer.weight"},
)  # fmt: skip

ATTENTION = (
    Row("layers.{l}.input_norm.weight", ("hidden",),
        hf=_HF + "input_layernorm.weight",
        core=_CORE + "self_attention.linear_qkv.layer_norm_weight",
        core_local=_CORE + "input_layernorm.weight"),
    Row("layers.{l}.attn.{q|k|v}.weight", ("heads*head_dim hidden", "kv_heads*head_dim hidden", "kv_heads*head_dim hidden"), tp=0,
        hf=_HF + "self_attn.{q|k|v}_proj.weight",
        core=Fused(_CORE + "self_attention.linear_qkv.weight", groups="kv_heads")),
    Row("layers.{l}.attn.{q|k|v}.bias", ("heads*head_dim", "kv_heads*head_dim", "kv_heads*head_dim"), tp=0, when="qkv_bias",
        hf=_HF + "self_attn.{q|k|v}_proj.bias",
        core=Fused(_CORE + "self_attention.linear_qkv.bias", groups="kv_heads")),
    Row("layers.{l}.attn.{q|k}_norm.weight", ("head_dim", "head_dim"), when="qk_norm",
        hf=_HF + "self_attn.{q|k}_norm.weight",
        core=_CORE + "self_attention.{q|k}_layernorm.weight"),
    Row("layers.{l}.attn.o.weight", ("hidden heads*head_dim",), tp=1,
        hf=_HF + "self_attn.o_proj.weight",
        core=_CORE + "self_attention.linear_proj.weight"),
    Row("layers.{l}.attn.o.bias", ("hidden",), when="o_bias",
        hf=_HF + "self_attn.o_proj.bias",
        core=_CORE + "self_attention.linear_proj.bias"),
)  # fmt: skip

MLP = (
    Row("layers.{l}.mlp_norm.weight", ("hidden",),
        hf=_HF + "post_attention_layernorm.weight",
        core=_CORE + "mlp.linear_fc1.layer_norm_weight",
        core_local=_CORE + "pre_mlp_layernorm.weight"),
    Row("layers.{l}.mlp.{gate|up}.weight", ("ffn hidden", "ffn hidden"), tp=0,
        hf=_HF + "mlp.{gate|up}_proj.weight",
        core=Fused(_CORE + "mlp.linear_fc1.weight")),
    Row("layers.{l}.mlp.{gate|up}.bias", ("ffn", "ffn"), tp=0, when="mlp_bias",
        hf=_HF + "mlp.{gate|up}_proj.bias",
        core=Fused(_CORE + "mlp.linear_fc1.bias")),
    Row("layers.{l}.mlp.down.weight", ("hidden ffn",), tp=1,
        hf=_HF + "mlp.down_proj.weight",
        core=_CORE + "mlp.linear_fc2.weight"),
    Row("layers.{l}.mlp.down.bias", ("hidden",), when="mlp_bias",
        hf=_HF + "mlp.down_proj.bias",
        core=_CORE + "mlp.linear_fc2.bias"),
)  # fmt: skip

HEAD = (
    Row("final_norm.weight", ("hidden",), stage="last",
        hf="model.norm.weight",
        core="decoder.final_layernorm.weight"),
    Row("head.weight", ("vocab hidden",), tp=0, stage="last", when="untied", padded_vocab=True,
        hf="lm_head.weight",
        core="output_layer.weight"),
)  # fmt: skip

ROWS = (EMBEDDING, *ATTENTION, *MLP, *HEAD)
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
"""Older transformers saved the rotary frequencies, which follow from the configuration."""


def read_hf(raw: Mapping[str, Any]) -> ModelConfig:
    attention_bias, mlp_bias = bool(raw.get("attention_bias")), bool(raw.get("mlp_bias"))
    defaults = {"max_position_embeddings": 2048}
    return read_decoder(raw, "llama", defaults, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=mlp_bias)


def write_hf(config: ModelConfig) -> dict[str, Any]:
    refuse(config, "LlamaForCausalLM", qk_norm="q and k norms", sliding_window="a sliding window")
    if config.qkv_bias != config.o_bias:
        refuse(
            config,
            "LlamaForCausalLM",
            qkv_bias="biases on q, k, v but not on the output",
            o_bias="a bias on the output only",
        )
    return write_decoder(config, "LlamaForCausalLM", "llama", attention_bias=config.qkv_bias, mlp_bias=config.mlp_bias)


FAMILY = Family("llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), "llama", ROWS, read_hf, write_hf, IGNORED)
