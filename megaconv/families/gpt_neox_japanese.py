"""GPT-NeoX Japanese: GPT-NeoX with sublayers one after the other, and one bias, of the last layer's attention.

Megatron core has no such bias: these models are converted between Hugging Face's files, and trained.
"""

from dataclasses import replace

from megaconv.errors import NotExpressible
from megaconv.families.gpt_neox import FAMILY as NEOX
from megaconv.families.gpt_neox import OWN_ROPE, own_share
from megaconv.families.parts.decoder_keys import GELUS, LAYER_NORM, body_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import Fields, Keys, Raw, choice, need_size
from megaconv.families.parts.row_changes import (
    in_core,
    respelled,
    with_modules,
    with_norm_biases,
    without_gate,
)
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused, Row

_QKV = Fused("gpt_neox_japanese.layers.{l}.attention.query_key_value.weight", groups="kv_heads")
_MODULES = {
    "model.embed_tokens": "gpt_neox_japanese.embed_in",
    "model.layers": "gpt_neox_japanese.layers",
    "self_attn.o_proj.bias": "attention.dense_bias",
    "self_attn.": "attention.",
    "o_proj": "dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "model.norm": "gpt_neox_japanese.final_layer_norm",
    "lm_head": "embed_out",
}


def _only_last(row: Row) -> Row:
    return replace(row, when="o_bias_here") if row.when == "o_bias" else row


_ALL = respelled(
    with_norm_biases(without_gate(LLAMA_ROWS)), {"layers.{l}.attn.{q|k|v}.weight": {"hf": _QKV}}
)
ROWS = in_core(with_modules(tuple(map(_only_last, _ALL)), _MODULES))

_MULTIPLE = "intermediate_multiple_size"


def _read_width(raw: Raw) -> Fields:
    return {"mlp.ffn": need_size(raw, "hidden_size") * need_size(raw, _MULTIPLE, 4)}


def _write_width(config: ModelConfig) -> Raw:
    multiple, rest = divmod(config.mlp.ffn, config.hidden)
    if rest:
        raise NotExpressible(
            f"the model's mlp.ffn is {config.mlp.ffn}, which is no multiple ({_MULTIPLE}) of the hidden size {config.hidden}"
        )
    return {_MULTIPLE: multiple}


_BODY = body_keys(
    positions=2048, epsilon=1e-5, epsilon_key="layer_norm_eps", rotation=OWN_ROPE, partial=own_share(1.0), tied=True,
    tokens=(31996, 31999, None),
)  # fmt: skip
_KEYS = (
    *(each for each in _BODY if each.names != ("intermediate_size",)),
    Keys((_MULTIPLE,), _read_width, _write_width),
    multi_head("num_attention_heads", "hidden_size"),
    choice("hidden_act", "mlp.activation", GELUS, "gelu"),
    Keys(("is_decoder",), lambda raw: {}, lambda config: {}),
)
_FIXED = {**LAYER_NORM, "mlp.gated": False, "attention.o_bias": True, "attention.o_bias_last": True}

FAMILY = replace(
    NEOX, name="gpt_neox_japanese", architectures=("GPTNeoXJapaneseForCausalLM",), model_type="gpt_neox_japanese", rows=ROWS,
    keys=_KEYS, fixed=_FIXED, ignored=(), prefix="gpt_neox_japanese.", proven="names",
)  # fmt: skip
