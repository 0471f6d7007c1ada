"""Parts of hybrids of gated attention and gated delta nets: Qwen3-Next, Qwen 3.5 and models that follow them.

    layers.{l}.linear.{q|k|v|z|b|a}   projections of a gated delta net: q, k and v pass a convolution, z gates output,
                                      b is the amount written (sigmoid), a, with A_log and dt_bias, the amount forgotten
    layers.{l}.attn.gate              of attention: as wide as q, its sigmoid scales the output of attention

Each of the six projections is sharded separately, by its heads. All norms multiply by their weight + 1, except
`out_norm`. Transformer Engine's layers also add 1 to the weight of `out_norm`, so they store it minus 1. Source:
modeling_qwen3_next.py and modeling_qwen3_5.py of transformers 5; gated_delta_net.py and attention.py of megatron-core
0.16.1.
"""

from typing import Any

from megaconv.families.parts.decoder_keys import LLAMA_LIKE, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION
from megaconv.families.parts.keys import Keys, Raw, need_size, size
from megaconv.families.parts.layer_mixers import layer_mixers
from megaconv.families.parts.rope import partial_rotation
from megaconv.model.table import Fused, Row, Separate, Shifted, Spelling

_HF = "model.layers.{l}."
_CORE = "decoder.layers.{l}.self_attention."
_Q, _KV, _LINEAR_K, _LINEAR_V = (
    "heads*head_dim", "kv_heads*head_dim", "linear_key_heads*linear_key_dim", "linear_value_heads*linear_value_dim"
)  # fmt: skip

_GATED_QKV = Row(
    "layers.{l}.attn.{q|gate|k|v}.weight", (f"{_Q} hidden", f"{_Q} hidden", f"{_KV} hidden", f"{_KV} hidden"), tp=0,
    when="attention",
    hf=(Fused(_HF + "self_attn.q_proj.weight", groups="heads", members=(0, 1)), Separate(_HF + "self_attn.{k|v}_proj.weight")),
    core=Fused(_CORE + "linear_qkv.weight", groups="kv_heads"),
)  # fmt: skip


def _of_attention(row: Row) -> Row:
    """The row for a model in which only some layers have attention, from the row of a model in which all have it."""
    kept = row.without("legacy", "meta")
    when = f"attention {row.when or ''}".strip()
    return Row(row.canonical, row.shapes, names=kept.names, tp=row.tp, when=when)


GATED_ATTENTION = tuple(
    _GATED_QKV if row.canonical.endswith("{q|k|v}.weight") else _of_attention(row)
    for row in ATTENTION
    if not row.canonical.endswith(".bias")
)


def linear_rows(projections: Spelling, *, zero_centered: bool = True) -> tuple[Row, ...]:
    """The rows of a gated delta net.

    projections: Hugging Face's spelling of q, k, v, z, b and a. zero_centered: True if the model's other norms multiply
    by their weight + 1.
    """
    out_norm = _CORE + "out_norm.weight"
    return (
        Row("layers.{l}.input_norm.weight", ("hidden",), when="linear",
            hf=_HF + "input_layernorm.weight",
            core=_CORE + "in_proj.layer_norm_weight",
            core_local="decoder.layers.{l}.input_layernorm.weight"),
        Row("layers.{l}.linear.{q|k|v|z|b|a}.weight",
            (f"{_LINEAR_K} hidden", f"{_LINEAR_K} hidden", f"{_LINEAR_V} hidden", f"{_LINEAR_V} hidden",
             "linear_value_heads hidden", "linear_value_heads hidden"), tp=0, when="linear",
            hf=projections,
            core=Fused(_CORE + "in_proj.weight")),
        Row("layers.{l}.linear.conv.{q|k|v}.weight",
            (f"{_LINEAR_K} 1 linear_conv", f"{_LINEAR_K} 1 linear_conv", f"{_LINEAR_V} 1 linear_conv"), tp=0, when="linear",
            hf=Fused(_HF + "linear_attn.conv1d.weight"),
            core=Fused(_CORE + "conv1d.weight")),
        Row("layers.{l}.linear.{dt_bias|A_log}", ("linear_value_heads", "linear_value_heads"), tp=0, when="linear",
            hf=_HF + "linear_attn.{dt_bias|A_log}",
            core=_CORE + "{dt_bias|A_log}"),
        Row("layers.{l}.linear.out_norm.weight", ("linear_value_dim",), when="linear",
            hf=_HF + "linear_attn.norm.weight",
            core=Shifted(out_norm, by=-1) if zero_centered else out_norm,
            core_local=out_norm,
            core_local_keys=out_norm),
        Row("layers.{l}.linear.o.weight", (f"hidden {_LINEAR_V}",), tp=1, when="linear",
            hf=_HF + "linear_attn.out_proj.weight",
            core=_CORE + "out_proj.weight"),
    )  # fmt: skip


GROUPED_PROJECTIONS: Spelling = (
    Fused(_HF + "linear_attn.in_proj_qkvz.weight", groups="linear_key_heads", members=(0, 1, 2, 3)),
    Fused(_HF + "linear_attn.in_proj_ba.weight", groups="linear_key_heads", members=(4, 5)),
)
"""Qwen3-Next's projections: the rows of a key head and of the value heads that it serves are stored together."""
PROJECTIONS: Spelling = (
    Fused(_HF + "linear_attn.in_proj_qkv.weight", members=(0, 1, 2)),
    Separate(_HF + "linear_attn.in_proj_{z|b|a}.weight"),
)
"""Qwen 3.5's projections."""

WORDS = {"linear_attention": "linear", "full_attention": "attention"}
"""Word for a layer -> mixer."""


def _every_fourth(raw: Raw, layers: int) -> list[str]:
    """The words of a model in which every full_attention_interval-th layer has attention."""
    interval = need_size(raw, "full_attention_interval", 4)
    linear, full = WORDS
    return [linear if (layer + 1) % interval else full for layer in range(layers)]


def delta_net_sizes(*, key_heads: int, value_heads: int) -> tuple[Keys, ...]:
    """The keys of a delta net's sizes. The numbers are the defaults for missing keys."""
    return (
        size("linear_num_key_heads", "linear.key_heads", key_heads),
        size("linear_num_value_heads", "linear.value_heads", value_heads),
        size("linear_key_head_dim", "linear.key_dim", 128),
        size("linear_value_head_dim", "linear.value_dim", 128),
        size("linear_conv_kernel_dim", "linear.conv", 4),
    )


def hybrid_keys(*, kv_heads: int) -> tuple[Keys, ...]:
    """The keys of a hybrid. kv_heads and all numbers here are the defaults for missing keys."""
    return (
        *decoder_keys(
            positions=32768, kv_heads=kv_heads, head_dim=256, partial=partial_rotation(0.25)
        ),
        layer_mixers(WORDS, _every_fourth, "full_attention_interval"),
        *delta_net_sizes(key_heads=16, value_heads=32),
    )


HYBRID: dict[str, Any] = LLAMA_LIKE | {
    "norm.zero_centered": True,
    "attention.qk_norm": True,
    "attention.output_gate": True,
}
"""Fields that all these hybrids share."""
HYBRID_ONLY: Raw = {"hidden_act": "silu", "attention_bias": False}
HYBRID_FEATURES = ("zero_centered", "qk_norm", "output_gate")
RECOGNIZED = "rope !norm_bias silu gated pre_norm zero_centered qk_norm output_gate !sinks !clamped !mla !encoder !transform"
