"""Granite 3 with experts in every layer: as Granite, which has factors that Megatron core lacks.

These models are converted between Hugging Face's files, and trained.
"""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, GATED_SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD
from megaconv.families.parts.experts import EXPERTS_WIDTH, MOE_NORM
from megaconv.families.parts.granite import EXPERTS, FACTORS
from megaconv.families.parts.keys import size
from megaconv.families.parts.row_changes import in_core

ROWS = in_core((EMBEDDING, *ATTENTION, MOE_NORM, *EXPERTS, *HEAD))
KEYS = (
    *decoder_keys(positions=2048, tokens=(1, 2, None)),
    GATED_SILU,
    ATTENTION_BIASES,
    *FACTORS,
    EXPERTS_WIDTH,
    size("num_local_experts", "experts.count", 8),
    size("num_experts_per_tok", "experts.per_token", 2),
)

FAMILY = replace(
    LLAMA, name="granite_moe", architectures=("GraniteMoeForCausalLM",), model_type="granitemoe", rows=ROWS, keys=KEYS,
    fixed={**LLAMA.fixed, "layers.mlp": "experts"}, recognized=None, proven="names",
)  # fmt: skip
