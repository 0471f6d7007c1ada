"""Qwen 3.5 MoE, text only: Qwen 3.5's mixers, and Qwen3-Next's experts in every layer.

Megatron's arguments don't distinguish it from Qwen3-Next.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_rows import HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.delta_net import HYBRID, HYBRID_FEATURES, HYBRID_ONLY, hybrid_keys
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS, QWEN_SHARED
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import follows, need_size, size
from megaconv.families.parts.mtp import OF_QWEN
from megaconv.families.parts.row_changes import in_core
from megaconv.families.qwen3_5 import MIXERS

_ROWS = (*MIXERS, MOE_NORM, *QWEN_EXPERTS, *QWEN_SHARED, *HEAD)
_WIDTH = 512
_KEYS = (
    *without_keys(hybrid_keys(kv_heads=2), "intermediate_size"),
    size("num_experts", "experts.count", 256),
    size("num_experts_per_tok", "experts.per_token", 8),
    size("moe_intermediate_size", "experts.ffn", _WIDTH),
    follows("mlp.ffn", lambda raw: need_size(raw, "moe_intermediate_size", _WIDTH)),
    size("shared_expert_intermediate_size", "experts.shared_ffn", 512),
    OF_QWEN.keys,
)
_ALL_EXPERTS = {"layers.mlp": "experts", "experts.shared_gate": True, "experts.renormalize": True}

FAMILY = Family(
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM",),
    model_type="qwen3_5_moe_text",
    rows=OF_QWEN.rows(in_core(_ROWS)),
    keys=_KEYS,
    fixed=HYBRID | _ALL_EXPERTS,
    only=HYBRID_ONLY,
    ignored=ROPE_FREQUENCIES,
    complete=OF_QWEN.complete,
    features=HYBRID_FEATURES,
    recognized=None,
)
