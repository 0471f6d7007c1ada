"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key/value head, or with q, k and v head by head."""

from dataclasses import replace

from megaconv.families.gpt2 import FAMILY as GPT2
from megaconv.families.gpt2 import WIDTH
from megaconv.families.parts.decoder_keys import (
    ALL_BIASES,
    GELUS,
    LEARNED_POSITIONS,
    model_keys,
    multi_head,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import Fields, Keys, Raw, choice, need_flag, number, size
from megaconv.families.parts.row_changes import (
    in_core,
    respelled,
    with_modules,
    with_norm_biases,
    with_positions,
    without_gate,
)
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused

_QKV = "transformer.h.{l}.attn.c_attn."
_FUSED = {
    f"layers.{{l}}.attn.{{q|k|v}}.{kind}": {"hf": Fused(_QKV + kind, groups="kv_heads")}
    for kind in ("weight", "bias")
}
_MODULES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers.{l}": "transformer.h.{l}",
    "input_layernorm": "ln_1",
    "self_attn.": "attn.",
    "o_proj": "c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "model.norm": "transformer.ln_f",
}
_LAYERS = with_modules(respelled(with_norm_biases(without_gate(LLAMA_ROWS)), _FUSED), _MODULES)
ROWS = in_core(with_positions(_LAYERS, "transformer.wpe"))

_SHARES_KV, _KV_HEADS = "multi_query", "num_key_value_heads"
_HEADS = multi_head("n_head", "n_embd")


def _read_heads(raw: Raw) -> Fields:
    found = _HEADS.read(raw)
    return {**found, "attention.kv_heads": 1} if need_flag(raw, _SHARES_KV, True) else found


def _write_heads(config: ModelConfig) -> Raw:
    """transformers writes the number of key/value heads too, and computes it anew when it reads a file."""
    kv_heads = config.attention.kv_heads
    return {**_HEADS.write(config), _SHARES_KV: kv_heads == 1, _KV_HEADS: kv_heads}


_KEYS = (
    size("n_embd", "hidden"),
    size("n_layer", "layers.count"),
    size("n_positions", "max_positions", 1024),
    Keys((*_HEADS.names, _SHARES_KV, _KV_HEADS), _read_heads, _write_heads),
    WIDTH,
    number("layer_norm_epsilon", "norm.epsilon", 1e-5),
    choice("activation_function", "mlp.activation", GELUS, "gelu_pytorch_tanh"),
    *model_keys(tied=True, tokens=(50256, 50256, None)),
)

FAMILY = replace(
    GPT2, name="gpt_bigcode", architectures=("GPTBigCodeForCausalLM",), model_type="gpt_bigcode", rows=ROWS, keys=_KEYS,
    fixed={**LEARNED_POSITIONS, **ALL_BIASES}, only={"scale_attn_weights": True}, recognized=None,
)  # fmt: skip
