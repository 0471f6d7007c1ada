"""EXAONE 3.0, 3.5 and Deep: Llama under GPT-2's names.

    hf    transformer.wte, transformer.h.{l}.{ln_1, attn.attention, ln_2, mlp.{c_fc_0, c_fc_1, c_proj}}, transformer.ln_f

Published files have these names, and so has what save_pretrained of transformers 5.24 writes. Its class is Llama's, with
another model_type and other keys; megaconv reads both forms and writes the published keys, which both classes understand.
Source: ExaoneConfig and conversion_mapping.py of transformers 5.24, and the repository LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct.
"""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    HEADS_DIVIDE_HIDDEN,
    SILU,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import flags, size
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core, with_modules

_MODULES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers.{l}": "transformer.h.{l}",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn": "attn.attention",
    "mlp.{gate|up}_proj": "mlp.{c_fc_0|c_fc_1}",
    "mlp.down_proj": "mlp.c_proj",
    "model.norm": "transformer.ln_f",
}
_USUAL = decoder_keys(
    positions=4096, kv_heads=8, ffn=14336, epsilon=1e-5, epsilon_key="layer_norm_epsilon", rotation=rope(5e5), tokens=(1, 361, 0),
)  # fmt: skip
_KEYS = (
    *without_keys(_USUAL, "num_hidden_layers"),
    size("num_layers", "layers.count"),
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    HEADS_DIVIDE_HIDDEN,
)
_OF_TRANSFORMERS = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}

FAMILY = replace(
    LLAMA, name="exaone", architectures=("ExaoneForCausalLM",), classes_of_others=LLAMA.architectures, model_type="exaone",
    rows=in_core(with_modules(LLAMA_ROWS, _MODULES)), keys=_KEYS, only={"activation_function": SILU["hidden_act"]},
    aliases=_OF_TRANSFORMERS, prefix="transformer.", recognized=None,
)  # fmt: skip
"""`recognized` is None, since Megatron's arguments don't distinguish this family from Llama."""
