"""DeepSeek V4: attention to compressed tokens, several mixed residual streams, and experts chosen by a table in some layers.

    hf           layers.{l}.{attn_norm, attn, hc_attn_fn, ffn_norm, ffn, hc_ffn_fn}, embed, norm, head
    hf_stacked   model.layers.{l}.{input_layernorm, self_attn, attn_hc, post_attention_layernorm, mlp, ffn_hc}, model.embed_tokens

The first form is that of the published files. transformers reads both forms. Its save_pretrained mixes their names, and
megaconv reads this mixture too. Megatron core has no such layers: these models are converted between Hugging Face's
files. Layers for multi-token prediction are left out. Source: DeepseekV4Config, modeling_deepseek_v4.py and
conversion_mapping.py of transformers 5.23.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from megaconv.families import Family
from megaconv.families.parts.compressed_attention import (
    COMPRESSED_ATTENTION,
    attention_keys,
    entry_keys,
)
from megaconv.families.parts.compressed_ropes import compressed_ropes
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD
from megaconv.families.parts.deepseek_experts import DEEPSEEK_SHARED, ROUTER_BIAS, routed_experts
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS
from megaconv.families.parts.hash_layers import HASH_TABLE, hash_layers
from megaconv.families.parts.hyper_connections import HYPER_CONNECTIONS, HYPER_KEYS
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import Keys, choice, follows, need_size, number
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.families.parts.row_changes import hf_only, respelled
from megaconv.model.table import Copied

_FFN, _MLP = "layers.{l}.ffn.", "model.layers.{l}.mlp."
_EXPERTS = _FFN + "experts.{e}."
_SHARED, _CLASS_SHARED = _FFN + "shared_experts.", _MLP + "shared_experts."
_NAMES = {
    "embed.weight": {"hf": "embed.weight", "hf_stacked": "model.embed_tokens.weight"},
    "final_norm.weight": {"hf": "norm.weight", "hf_stacked": "model.norm.weight"},
    "head.weight": {"hf": "head.weight", "hf_stacked": "lm_head.weight"},
    MOE_NORM.canonical: {
        "hf": "layers.{l}.ffn_norm.weight",
        "hf_stacked": "model.layers.{l}.post_attention_layernorm.weight",
    },
    "layers.{l}.mlp.router.weight": {
        "hf": _FFN + "gate.weight",
        "hf_stacked": _MLP + "gate.weight",
    },
    ROUTER_BIAS.canonical: {
        "hf": _FFN + "gate.bias",
        "hf_stacked": _MLP + "gate.e_score_correction_bias",
    },
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": {"hf": _EXPERTS + "{w1|w3}.weight"},
    "layers.{l}.mlp.experts.{e}.down.weight": {"hf": _EXPERTS + "w2.weight"},
    "layers.{l}.mlp.shared.{gate|up}.weight": {
        "hf": _SHARED + "{w1|w3}.weight",
        "hf_stacked": _CLASS_SHARED + "{gate_proj|up_proj}.weight",
    },
    "layers.{l}.mlp.shared.down.weight": {
        "hf": _SHARED + "w2.weight",
        "hf_stacked": _CLASS_SHARED + "down_proj.weight",
    },
}
_EMBEDDING = replace(EMBEDDING, copies=(Copied("head", {"hf": ("head.weight",)}),))
_BIAS = replace(ROUTER_BIAS, when="moe router_bias !hashed")
_MOE = (MOE_NORM, *QWEN_EXPERTS, _BIAS, *DEEPSEEK_SHARED)
_OF_LAYERS = (*_MOE, *COMPRESSED_ATTENTION, HASH_TABLE, *HYPER_CONNECTIONS)
ROWS = hf_only(respelled((_EMBEDDING, *_OF_LAYERS, *HEAD), _NAMES))

_SAVED = re.compile(r"model\.layers\.\d+\.(attn|ffn)\..*")
_HEAD_WEIGHTS = re.compile(r"hc_head\.hc_(\w+)")


def _published_names(names: Collection[str]) -> Mapping[str, str]:
    """The published names of tensors in files that save_pretrained of transformers 5.23 wrote."""
    if not any(_SAVED.fullmatch(name) for name in names):
        return {}
    return {name: _published(name) for name in names if name.startswith("model.")}


def _published(saved: str) -> str:
    name = saved.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.")
    if name == "embed_tokens.weight":
        return "embed.weight"
    return _HEAD_WEIGHTS.sub(r"hc_head_\1", name)


_MTP = "num_nextn_predict_layers"
_BODY = body_keys(positions=1048576, tokens=(0, 1, None))
_KEYS = (
    *without_keys(_BODY, "intermediate_size", "rope_theta", "partial_rotary_factor"),
    compressed_ropes(),
    *attention_keys(heads=64, head_dim=512, rank=1024, groups=8, group_rank=1024, window=128),
    *entry_keys(heads=64, head_dim=128, topk=512),
    *HYPER_KEYS,
    hash_layers(3),
    *routed_experts(count=256, per_token=6, width=2048),
    follows("experts.shared_ffn", lambda raw: need_size(raw, "moe_intermediate_size", 2048)),
    follows("mlp.ffn", lambda raw: need_size(raw, "moe_intermediate_size", 2048)),
    number("routed_scaling_factor", "experts.scale", 1.5),
    number("swiglu_limit", "mlp.clamp", 10.0),
    choice(
        "scoring_func",
        "experts.score",
        {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"},
        "sqrtsoftplus",
    ),
    Keys((_MTP,), lambda raw: {}, lambda config: {_MTP: 0}),
)
_FIXED = {
    **LLAMA_LIKE,
    "layers.mixer": "compressed",
    "layers.mlp": "experts",
    "attention.kv_heads": 1,
    "attention.sinks": True,
    "positions.interleaved": True,
    "experts.router_bias": True,
}
_ONLY = {
    **SILU,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "mlp_bias": False,
}
_ALIASES = {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"}

FAMILY = Family(
    name="deepseek_v4",
    architectures=("DeepseekV4ForCausalLM",),
    model_type="deepseek_v4",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    aliases=_ALIASES,
    left_out=MTP_LEFT_OUT,
    other_names=_published_names,
    recognized=None,
    proven="names",
)
