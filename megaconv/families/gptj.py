"""GPT-J: one LayerNorm before attention and the MLP, which work in parallel; rope rotates neighbours in a part of each head.

The MLP and the head have biases, attention has none. Megatron core has no such layer: these models are converted between
Hugging Face's files, and trained.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.gpt2 import FAMILY as GPT2
from megaconv.families.gpt2 import WIDTH
from megaconv.families.parts.decoder_keys import GELUS, LAYER_NORM, PARALLEL, model_keys, multi_head
from megaconv.families.parts.decoder_rows import LLAMA_ROWS
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    need_size,
    number,
    size,
)
from megaconv.families.parts.row_changes import (
    in_core,
    with_head_bias,
    with_modules,
    with_norm_biases,
    with_shared_norm,
    without_gate,
)
from megaconv.model.config import ModelConfig

MODULES = {
    "model.embed_tokens": "transformer.wte",
    "model.layers.{l}": "transformer.h.{l}",
    "input_layernorm": "ln_1",
    "self_attn.{q|k|v}_proj": "attn.{q|k|v}_proj",
    "self_attn.{q|k}_norm": "attn.{q|k}_norm",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc_in",
    "mlp.down_proj": "mlp.fc_out",
    "model.norm": "transformer.ln_f",
}
_LAYER_NORMS = with_shared_norm(with_norm_biases(without_gate(LLAMA_ROWS)))
ROWS = in_core(with_modules(with_head_bias(_LAYER_NORMS), MODULES))

_ROTARY = "rotary_dim"


def _read_share(raw: Raw) -> Fields:
    heads = multi_head("n_head", "n_embd").read(raw)
    head_dim = heads["attention.head_dim"]
    rotating = need_size(raw, _ROTARY, 64)
    if rotating > head_dim:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_ROTARY} {rotating} is more than the {head_dim} elements of a head"
        )
    return {"positions.rotary_percent": rotating / head_dim}


def _write_share(config: ModelConfig) -> Raw:
    return {_ROTARY: round(config.attention.head_dim * config.positions.rotary_percent)}


KEYS = (
    size("n_embd", "hidden"),
    size("n_layer", "layers.count"),
    size("n_positions", "max_positions", 2048),
    multi_head("n_head", "n_embd"),
    WIDTH,
    number("layer_norm_epsilon", "norm.epsilon", 1e-5),
    choice("activation_function", "mlp.activation", GELUS, "gelu_new"),
    Keys((_ROTARY,), _read_share, _write_share),
    *model_keys(tied=False, tokens=(50256, 50256, None)),
)
FIXED: dict[str, Any] = {
    **LAYER_NORM,
    **PARALLEL,
    "mlp.gated": False,
    "mlp.bias": True,
    "head.bias": True,
    "positions.interleaved": True,
}
"""The base of rope is always 10000."""
_MASKS = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias|causal_mask|embed_positions)",)
"""Older files store the causal mask."""

FAMILY = Family(
    name="gptj",
    architectures=("GPTJForCausalLM",),
    model_type="gptj",
    rows=ROWS,
    keys=KEYS,
    fixed=FIXED,
    aliases=GPT2.aliases,
    ignored=_MASKS,
    prefix="transformer.",
    recognized=None,
    proven="names",
)
