"""MPT: ALiBi in place of positions, LayerNorms and matrices without biases.

Megatron core has no ALiBi: these models are converted between Hugging Face's files, and trained.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import model_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    follows,
    need_size,
    number,
    size,
)
from megaconv.families.parts.row_changes import in_core, respelled, with_modules, without_gate
from megaconv.model.config import ModelConfig
from megaconv.model.table import Fused

_FUSED = {
    "layers.{l}.attn.{q|k|v}.weight": {"hf": Fused("transformer.blocks.{l}.attn.Wqkv.weight")}
}
_MODULES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers.{l}": "transformer.blocks.{l}",
    "input_layernorm": "norm_1",
    "self_attn.": "attn.",
    "o_proj": "out_proj",
    "post_attention_layernorm": "norm_2",
    "mlp.": "ffn.",
    "model.norm": "transformer.norm_f",
}
ROWS = in_core(with_modules(respelled(without_gate(LLAMA_ROWS), _FUSED), _MODULES))

_ATTENTION = "attn_config"
_ATTENTION_ONLY = {"attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False, "alibi": True, "alibi_bias_max": 8}  # fmt: skip


def _read_attention(raw: Raw) -> Fields:
    stated: Any = raw.get(_ATTENTION) or {}
    if not isinstance(stated, dict):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_ATTENTION} should be an object, found {stated!r}"
        )
    for key, value in _ATTENTION_ONLY.items():
        if stated.get(key, value) != value:
            raise NotExpressible(
                f"{CONFIG_NAME}: {_ATTENTION} has {key} {stated[key]!r}, only {value!r} is supported"
            )
    return {
        "attention.clip": stated.get("clip_qkv") or None,
        "attention.scale": stated.get("softmax_scale"),
    }


def _write_attention(config: ModelConfig) -> Raw:
    attention = config.attention
    own = {"clip_qkv": attention.clip, "softmax_scale": attention.scale}
    return {_ATTENTION: {**_ATTENTION_ONLY, **own}}


def _width(raw: Raw) -> int:
    return 4 * need_size(raw, "d_model", 2048)


_KEYS = (
    size("d_model", "hidden", 2048),
    size("n_layers", "layers.count", 24),
    size("max_seq_len", "max_positions", 2048),
    follows("mlp.ffn", _width),
    multi_head("n_heads", "d_model"),
    Keys((_ATTENTION,), _read_attention, _write_attention),
    number("layer_norm_epsilon", "norm.epsilon", 1e-5),
    *model_keys(tied=True, tokens=(None, None, None)),
)
_FIXED = {
    "positions.kind": "alibi",
    "norm.kind": "LayerNorm",
    "norm.bias": False,
    "mlp.activation": "gelu",
    "mlp.gated": False,
}
_ONLY = {
    "expansion_ratio": 4,
    "learned_pos_emb": True,
    "logit_scale": None,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
}
"""transformers reads none of these keys: its layers have these values. learned_pos_emb has no effect with ALiBi."""
_ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}

FAMILY = Family(
    name="mpt",
    architectures=("MptForCausalLM", "MPTForCausalLM"),
    model_type="mpt",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    aliases=_ALIASES,
    prefix="transformer.",
    recognized=None,
    proven="names",
)
