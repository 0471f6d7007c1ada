"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, routed experts and a gated shared expert."""

from megaconv.families import Family
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
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
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS, QWEN_SHARED, qwen_expert_keys
from megaconv.families.parts.keys import size
from megaconv.families.parts.mtp import OF_QWEN
from megaconv.families.parts.row_changes import in_core

_MIXERS = (*GATED_ATTENTION, *linear_rows(GROUPED_PROJECTIONS))
_ROWS = (EMBEDDING, *_MIXERS, *MLP, MOE_NORM, *QWEN_EXPERTS, *QWEN_SHARED, *HEAD)

FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    model_type="qwen3_next",
    rows=OF_QWEN.rows(in_core(_ROWS)),
    keys=(
        *hybrid_keys(kv_heads=2),
        OF_QWEN.keys,
        *qwen_expert_keys(count=512, per_token=10, width=512, renormalize=True),
        size("shared_expert_intermediate_size", "experts.shared_ffn", 512),
    ),
    fixed=HYBRID | {"experts.shared_gate": True},
    only=HYBRID_ONLY,
    ignored=ROPE_FREQUENCIES,
    complete=OF_QWEN.complete,
    features=HYBRID_FEATURES,
    recognized=f"{RECOGNIZED} mixture !sigmoid_router shared_ffn",
)
