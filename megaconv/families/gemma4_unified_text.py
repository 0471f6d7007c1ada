"""The language model of Gemma 4 12B, which takes images and sound without encoders: Gemma 4's, with one embedding and
without experts."""

from dataclasses import replace

from megaconv.families.gemma4_text import FAMILY as GEMMA_4
from megaconv.families.parts.key_changes import with_defaults, without_keys
from megaconv.families.parts.keys import size

_KEYS = (
    *without_keys(GEMMA_4.keys, "num_experts", "hidden_size_per_layer_input"),
    size("intermediate_size", "mlp.ffn", 9216),
)

FAMILY = replace(
    GEMMA_4,
    name="gemma4_unified_text",
    architectures=("Gemma4UnifiedForCausalLM",),
    model_type="gemma4_unified_text",
    keys=with_defaults(_KEYS, {"sliding_window": 1024, "max_position_embeddings": 262144}),
)
