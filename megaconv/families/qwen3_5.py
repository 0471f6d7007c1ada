"""Qwen 3.5, text only, dense: Qwen3-Next's mixers with separate projections, and plain MLPs."""

from megaconv.families import Family
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.delta_net import (
    GATED_ATTENTION,
    HYBRID,
    HYBRID_FEATURES,
    HYBRID_ONLY,
    PROJECTIONS,
    RECOGNIZED,
    hybrid_keys,
    linear_rows,
)
from megaconv.families.parts.mtp import OF_QWEN
from megaconv.families.parts.row_changes import in_core

MIXERS = (EMBEDDING, *GATED_ATTENTION, *linear_rows(PROJECTIONS))
_ROWS = (*MIXERS, *MLP, *HEAD)

FAMILY = Family(
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM",),
    model_type="qwen3_5_text",
    rows=OF_QWEN.rows(in_core(_ROWS)),
    keys=(*hybrid_keys(kv_heads=4), OF_QWEN.keys),
    fixed=HYBRID,
    only=HYBRID_ONLY,
    ignored=ROPE_FREQUENCIES,
    complete=OF_QWEN.complete,
    features=HYBRID_FEATURES,
    recognized=f"{RECOGNIZED} !mixture",
)
