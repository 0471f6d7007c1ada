"""torchtitan's names of Qwen3, GPT-OSS and DeepSeek, as its models have them since release 0.3.

    layers.0.attention.qkv_linear.{wq,wk,wv}.weight                          q, k and v, each head's rows in halves
    layers.0.attention.{wq_a,q_norm,wq_b,wkv_a,kv_norm,wkv_b}.weight         latent attention
    layers.0.moe.routed_experts.inner_experts.{w1_EFD,w3_EFD,w2_EDF}         gate, up and down of all experts
    layers.0.moe.routed_experts.inner_experts.{mlp1,mlp2}_...                the experts of GPT-OSS, with biases
    layers.0.moe.expert_bias_E                                               a bias of each expert, which chooses experts
    mtp_layers.0....                                                         layers of multi-token prediction

torchtitan balances the experts of every model by `expert_bias_E`, if its `load_balance_coeff` is set, as it is by default.
Only DeepSeek V3 has such a bias in its other files. Its Llama has Meta's names (titan_names.py).
Source: models/{qwen3,gpt_oss,deepseek_v3}/ and models/common/ of torchtitan 0.3.0.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from formats.tensor import LazyTensor
from megaconv.families import Family
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.table import (
    Copied,
    Fused,
    Row,
    Separate,
    Spelling,
    Stacked,
    StackedTransposed,
)

FAMILIES = ("deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3", "qwen3_moe")
"""Families whose names were compared with those of torchtitan's models."""

EXPERT_BIAS = re.compile(r"(?:mtp_)?layers\.\d+\.moe\.expert_bias_E")
"""The names of the biases by which torchtitan balances experts."""

_EMBEDDING = "tok_embeddings.weight"
_L = "layers.{l}."
_ATTENTION, _MOE = _L + "attention.", _L + "moe."
_QKV = _ATTENTION + "qkv_linear."
_EXPERTS, _SHARED = _MOE + "routed_experts.inner_experts.", _MOE + "shared_experts."
_NAMES: Mapping[str, Spelling] = {
    "embed.weight": _EMBEDDING,
    _L + "input_norm.weight": _L + "attention_norm.weight",
    _L + "attn.{q|k|v}.weight": _QKV + "{wq|wk|wv}.weight",
    _L + "attn.{q|k|v}.bias": _QKV + "{wq|wk|wv}.bias",
    _L + "attn.{q|k}_norm.weight": _ATTENTION + "{q|k}_norm.weight",
    _L + "attn.sinks": _ATTENTION + "sinks",
    _L + "attn.q.weight": _ATTENTION + "wq.weight",
    _L + "attn.q_down.weight": _ATTENTION + "wq_a.weight",
    _L + "attn.q_latent_norm.weight": _ATTENTION + "q_norm.weight",
    _L + "attn.q_up.weight": _ATTENTION + "wq_b.weight",
    _L + "attn.kv_down.weight": _ATTENTION + "wkv_a.weight",
    _L + "attn.kv_latent_norm.weight": _ATTENTION + "kv_norm.weight",
    _L + "attn.{k|v}_up.weight": Fused(_ATTENTION + "wkv_b.weight", groups="heads"),
    _L + "attn.o.weight": _ATTENTION + "wo.weight",
    _L + "attn.o.bias": _ATTENTION + "wo.bias",
    _L + "mlp_norm.weight": _L + "ffn_norm.weight",
    _L + "mlp.{gate|up}.weight": _L + "feed_forward.{w1|w3}.weight",
    _L + "mlp.down.weight": _L + "feed_forward.w2.weight",
    _L + "mlp.router.weight": _MOE + "router.gate.weight",
    _L + "mlp.router.linear_bias": _MOE + "router.gate.bias",
    _L + "mlp.router.bias": _MOE + "expert_bias_E",
    _L + "mlp.shared.{gate|up}.weight": _SHARED + "{w1|w3}.weight",
    _L + "mlp.shared.down.weight": _SHARED + "w2.weight",
    _L + "mlp.experts.{e}.{gate|up}.weight": (
        Stacked(_EXPERTS + "w1_EFD", members=(0,)),
        Stacked(_EXPERTS + "w3_EFD", members=(1,)),
    ),
    _L + "mlp.experts.{e}.down.weight": Stacked(_EXPERTS + "w2_EDF"),
    _L + "mlp.experts.{e}.gate_up.weight": Stacked(_EXPERTS + "mlp1_weight_EGD"),
    _L + "mlp.experts.{e}.gate_up.bias": StackedTransposed(
        _EXPERTS + "mlp1_bias_EG", "experts 2*moe_ffn"
    ),
    "mtp.{l}.{embed|hidden}_norm.weight": _L + "{enorm|hnorm}.weight",
    "mtp.{l}.join.weight": _L + "eh_proj.weight",
    "mtp.{l}.final_norm.weight": _L + "mtp_norm.weight",
    "final_norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
}
_OF_GPT_OSS: Mapping[str, Spelling] = {
    _L + "mlp.experts.{e}.down.weight": Stacked(_EXPERTS + "mlp2_weight_EDF"),
    _L + "mlp.experts.{e}.down.bias": StackedTransposed(
        _EXPERTS + "mlp2_bias_ED", "experts hidden"
    ),
}
_FUSED: Mapping[str, Spelling] = {
    _L + "attn.{q|k|v}.weight": Fused(_QKV + "wqkv.weight", groups="kv_heads"),
    _L + "attn.{q|k|v}.bias": Fused(_QKV + "wqkv.bias", groups="kv_heads"),
}
"""q, k and v as the optimizer has them: one parameter (`fuse_qkv`)."""
_TIED_HEAD = Copied("head", {"titan": ("lm_head.weight",)})
"""torchtitan saves a tied weight under both names."""


def with_titan_names(family: Family) -> Family:
    """The family with torchtitan's names in its table. Only families of FAMILIES have any."""
    if family.name not in FAMILIES:
        return family
    rows = tuple(_named(row, family.name) for row in family.rows)

    def complete(config: ModelConfig, found: Mapping[str, LazyTensor]) -> ModelConfig:
        if _EMBEDDING not in found:
            return family.complete(config, found)
        return _without_missing(config, found.keys())

    return replace(family, rows=rows, complete=complete)


def _without_missing(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Set the number of layers of multi-token prediction to those that torchtitan's model has."""
    found = {name.split(".")[1] for name in names if name.startswith("mtp_layers.")}
    return changed(config, {"mtp_layers": min(config.mtp_layers, len(found))})


def _named(row: Row, family: str) -> Row:
    own = _OF_GPT_OSS if family == "gpt_oss" else {}
    spelled = own.get(row.canonical) or _spelled(row.canonical)
    if spelled is None:
        return row
    more = {"titan_fused": _FUSED[row.canonical]} if row.canonical in _FUSED else {}
    named = row.renamed(titan=spelled, **more)
    return replace(named, copies=(*row.copies, _TIED_HEAD)) if row.has_copies("head") else named


def _spelled(canonical: str) -> Spelling | None:
    """The names of a row. A layer of multi-token prediction has those of an ordinary layer."""
    if not canonical.startswith("mtp."):
        return _NAMES.get(canonical)
    found = _NAMES.get(canonical) or _NAMES.get(canonical.replace("mtp.", "layers.", 1))
    return None if found is None else _in_mtp(found)


def _in_mtp(spelled: Spelling) -> Spelling:
    """The same names below `mtp_layers`."""
    return tuple(map(_below_mtp, spelled)) if isinstance(spelled, tuple) else _below_mtp(spelled)


def _below_mtp(spelled: str | Separate) -> str | Separate:
    if isinstance(spelled, str):
        return "mtp_" + spelled
    return replace(spelled, name="mtp_" + spelled.name)


def further_biases(config: ModelConfig) -> Iterator[str]:
    """Yield the names of biases that torchtitan's model has, and that the family hasn't. Zeros change nothing."""
    if not config.experts.router_bias:
        for layer in config.layers_with("moe"):
            yield f"layers.{layer}.moe.expert_bias_E"
