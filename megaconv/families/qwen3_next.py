"""Qwen3-Next: gated delta nets and, every fourth layer, gated attention; routed experts and a gated shared one."""

from megaconv.families import Family
from megaconv.families.llama import EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.mixtral import MOE_NORM
from megaconv.families.parts.delta_net import (
    GATED_ATTENTION,
    GROUPED_PROJECTIONS,
    HYBRID,
    HYBRID_FEATURES,
    HYBRID_ONLY,
    RECOGNIZED,
    hybrid_keys,
    linear_rows,
)
from megaconv.families.parts.keys import size
from megaconv.families.parts.mtp import OF_QWEN
from megaconv.families.qwen2_moe import QWEN_EXPERTS, SHARED, SHARED_GATE, qwen_experts

EXPERTS = (MOE_NORM, *QWEN_EXPERTS, *SHARED, SHARED_GATE)
_ROWS = (EMBEDDING, *GATED_ATTENTION, *linear_rows(GROUPED_PROJECTIONS), *MLP, *EXPERTS, *HEAD)

FAMILY = Family(
    "qwen3_next", ("Qwen3NextForCausalLM",), "qwen3_next", OF_QWEN.rows(tuple(row.without("legacy", "meta") for row in _ROWS)),
    keys=(
        *hybrid_keys(kv_heads=2),
        OF_QWEN.keys,
        *qwen_experts(count=512, per_token=10, width=512, renormalize=True),
        size("shared_expert_intermediate_size", "experts.shared_ffn", 512),
    ),
    fixed=HYBRID | {"experts.shared_gate": True}, only=HYBRID_ONLY, ignored=IGNORED, complete=OF_QWEN.complete,
    features=HYBRID_FEATURES, recognized=f"{RECOGNIZED} mixture !sigmoid_router shared_ffn",
)  # fmt: skip
