"""Sarvam's models with experts and latent attention (105B): DeepSeek V3's tensors, with queries computed directly.

transformers 5.24 computes them with DeepSeek V3's class. It has other keys for some sizes, and its own model_type. megaconv
reads both forms and writes the published keys, which both classes understand. Source: SarvamMLAConfig of transformers 5.24;
Megatron-Bridge at 067f987df03b.
"""

from collections.abc import Mapping
from typing import Any

from megaconv.families import Family
from megaconv.families.deepseek_v3 import WITHOUT_MTP
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    SIGMOID_ROUTER,
    first_dense,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.keys import Fields, Keys, Raw
from megaconv.families.parts.latent_attention import LATENT_NORMS, latent_heads, one_epsilon
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core
from megaconv.model.config import ModelConfig

_OWN_WORD = "deepseek_yarn"
_ROPE = rope(10000.0)


def _renamed(scaling: Any, old: str, new: str) -> Any:
    if not isinstance(scaling, Mapping):
        return scaling
    return {
        key: new if key in ("type", "rope_type") and value == old else value
        for key, value in scaling.items()
    }


def _read(raw: Raw) -> Fields:
    scaled = ("rope_scaling", "rope_parameters")
    return _ROPE.read(
        {
            key: _renamed(value, _OWN_WORD, "yarn") if key in scaled else value
            for key, value in raw.items()
        }
    )


def _write(config: ModelConfig) -> Raw:
    return {key: _renamed(value, "yarn", _OWN_WORD) for key, value in _ROPE.write(config).items()}


_KEYS = (
    *body_keys(
        positions=4096, ffn=16384, rotation=Keys(_ROPE.names, _read, _write), tokens=(0, 1, None)
    ),
    latent_heads(kv_rank=512, q_rank=0, rope=64, nope=128, v=128),
    Keys(("q_head_dim",), lambda raw: {}, lambda config: {"q_head_dim": config.attention.head_dim}),
    *routed_experts(count=128, width=2048, count_key="num_experts"),
    shared_experts(count=1, width=2048, key="num_shared_experts"),
    first_dense(1),
    *sigmoid_routing(scale=2.5, groups=1, group_topk=1),
)
_ONLY = {
    "num_nextn_predict_layers": 0,
    "use_qk_norm": True,
    "moe_router_enable_expert_bias": True,
    "rope_interleave": True,
    "attention_bias": False,
    **SILU,
}
_OF_TRANSFORMERS = {
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}

FAMILY = Family(
    name="sarvam_mla",
    architectures=("SarvamMLAForCausalLM",),
    classes_of_others=("DeepseekV3ForCausalLM",),
    model_type="sarvam_mla",
    rows=in_core(WITHOUT_MTP),
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER, **LATENT_NORMS},
    only=_ONLY,
    aliases=_OF_TRANSFORMERS,
    ignored=ROPE_FREQUENCIES,
    notices=one_epsilon,
    features=("mla",),
    recognized=None,
)
"""`recognized` is None, since Megatron's arguments don't distinguish this family from DeepSeek V3."""
