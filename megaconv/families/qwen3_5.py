"""Qwen 3.5, text alone, dense: Qwen3-Next's mixers with projections of their own, and plain MLPs."""

from megaconv.families import Family
from megaconv.families.llama import EMBEDDING, HEAD, IGNORED, MLP
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

MIXERS = (EMBEDDING, *GATED_ATTENTION, *linear_rows(PROJECTIONS))
_ROWS = (*MIXERS, *MLP, *HEAD)

FAMILY = Family(
    "qwen3_5", ("Qwen3_5ForCausalLM",), "qwen3_5_text", OF_QWEN.rows(tuple(row.without("legacy", "meta") for row in _ROWS)),
    keys=(*hybrid_keys(kv_heads=4), OF_QWEN.keys), fixed=HYBRID, only=HYBRID_ONLY, ignored=IGNORED, complete=OF_QWEN.complete,
    features=HYBRID_FEATURES, recognized=f"{RECOGNIZED} !mixture",
)  # fmt: skip
