"""GPT-1: as GPT-2 under other names, with a norm of the sum after each sublayer in place of norms before sublayers.

    transformer.{tokens_embed, positions_embed}, transformer.h.{l}.{attn, ln_1, mlp, ln_2}

    n = ln_1(x + attn(x)),  output = ln_2(n + mlp(n))

No norm follows the last layer. Megatron core has no such layers. Its legacy models have them only after a norm of the
embedding. These models are converted between Hugging Face's files, and trained. Source: OpenAIGPTConfig and modeling_openai.py of
transformers 5.24.
"""

from dataclasses import replace

from megaconv.families import Family
from megaconv.families.gpt2 import FAMILY as GPT2
from megaconv.families.parts.decoder_keys import (
    ALL_BIASES,
    LEARNED_POSITIONS,
    model_keys,
    multi_head,
)
from megaconv.families.parts.keys import Raw, choice, follows, need_size, number, size
from megaconv.families.parts.row_changes import in_core, with_modules, without_rows
from megaconv.model.table import Row

_SUM_NORMS = {
    "layers.{l}.input_norm.{weight|bias}": "attn",
    "layers.{l}.mlp_norm.{weight|bias}": "mlp",
}
_CORE = {"attn": "attention_sum_norm", "mlp": "mlp_sum_norm"}
"""Sublayer -> the norm's name in checkpoints of the trainer."""
_MODULES = {
    "transformer.wte": "transformer.tokens_embed",
    "transformer.wpe": "transformer.positions_embed",
}


def _after_sums(row: Row) -> Row:
    """The row of a norm before a sublayer as the norm of the sum after it. Other rows are unchanged."""
    sublayer = _SUM_NORMS.get(row.canonical)
    if sublayer is None:
        return row
    moved = replace(row, canonical=f"layers.{{l}}.{sublayer}_output_norm.{{weight|bias}}")
    return moved.without("core").renamed(
        core=f"decoder.layers.{{l}}.{_CORE[sublayer]}.{{weight|bias}}"
    )


_ROWS = with_modules(without_rows(GPT2.rows, "final_norm.{weight|bias}"), _MODULES)
ROWS = in_core(tuple(map(_after_sums, _ROWS)))


def _width(raw: Raw) -> int:
    return 4 * need_size(raw, "n_embd")


_KEYS = (
    size("n_embd", "hidden"),
    size("n_layer", "layers.count"),
    size("n_positions", "max_positions", 512),
    multi_head("n_head", "n_embd"),
    follows("mlp.ffn", _width),
    number("layer_norm_epsilon", "norm.epsilon", 1e-5),
    choice("afn", "mlp.activation", {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}, "gelu"),
    *model_keys(tied=True, tokens=(None, None, None)),
)  # fmt: skip
_FIXED = {**LEARNED_POSITIONS, **ALL_BIASES, "norm.place": "after_sum", "norm.final": False}

FAMILY = Family(
    name="openai_gpt",
    architectures=("OpenAIGPTLMHeadModel",),
    model_type="openai-gpt",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    aliases=GPT2.aliases,
    ignored=GPT2.ignored,
    prefix="transformer.",
    recognized=None,
    proven="names",
)
