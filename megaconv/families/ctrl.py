"""CTRL: positions that are computed as sines and cosines, LayerNorm, ReLU, biases everywhere, also in the head."""

from megaconv.families import Family
from megaconv.families.gpt2 import FAMILY as GPT2
from megaconv.families.parts.decoder_keys import (
    ALL_BIASES,
    LEARNED_POSITIONS,
    model_keys,
    multi_head,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size, size
from megaconv.families.parts.row_changes import (
    in_core,
    with_head_bias,
    with_modules,
    with_norm_biases,
    without_gate,
)

_MODULES = {
    "model.embed_tokens": "transformer.w",
    "model.layers.{l}": "transformer.h.{l}",
    "input_layernorm": "layernorm1",
    "self_attn.{q|k|v}_proj": "multi_head_attention.{Wq|Wk|Wv}",
    "self_attn.o_proj": "multi_head_attention.dense",
    "post_attention_layernorm": "layernorm2",
    "mlp.up_proj": "ffn.0",
    "mlp.down_proj": "ffn.2",
    "model.norm": "transformer.layernorm",
}
_ROWS = tuple(row for row in LLAMA_ROWS if "qk_norm" not in (row.when or ""))
ROWS = in_core(with_modules(with_head_bias(with_norm_biases(without_gate(_ROWS))), _MODULES))


def _read_sizes(raw: Raw) -> Fields:
    hidden = need_size(raw, "n_embd")
    return {"hidden": hidden, "embedding_scale": hidden**0.5}


_KEYS = (
    Keys(("n_embd",), _read_sizes, lambda config: {"n_embd": config.hidden}),
    size("n_layer", "layers.count"),
    size("n_positions", "max_positions", 256),
    size("dff", "mlp.ffn"),
    multi_head("n_head", "n_embd"),
    *model_keys(tied=True, tokens=(None, None, None)),
)
_FIXED = {
    **LEARNED_POSITIONS,
    **ALL_BIASES,
    "positions.kind": "sinusoidal",
    "mlp.activation": "relu",
    "head.bias": True,
    "norm.epsilon": 1e-6,
}

FAMILY = Family(
    name="ctrl",
    architectures=("CTRLLMHeadModel",),
    model_type="ctrl",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={"layer_norm_epsilon": 1e-6},
    aliases=GPT2.aliases,
    prefix="transformer.",
    recognized=None,
    proven="names",
)
