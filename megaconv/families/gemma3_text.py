"""Gemma 3 (the models for text alone): Gemma 2's norms, norms of q and k, five layers of six with a window and a base of rope
of their own; no caps. Megatron core has no modules for these norms and two bases; Megatron-Bridge's Gemma 3 has.
"""

from megaconv.families import Family
from megaconv.families.gemma2 import GEMMA_2, GEMMA_LIKE, ROWS, SANDWICHED
from megaconv.families.llama import IGNORED
from megaconv.families.parts.decoder_keys import decoder_keys, windows_by_layer
from megaconv.families.parts.layer_ropes import layer_ropes

_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
"""How many layers there are for each one without a window, where layer_types doesn't say it."""
_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=4, head_dim=256, rotation=layer_ropes(1e6, 1e4), tokens=(2, 1, 0), tied=True
    ),
    *SANDWICHED,
    windows_by_layer(4096, full_every=6, pattern=_PATTERN),
)

FAMILY = Family(
    "gemma3_text", ("Gemma3ForCausalLM",), "gemma3_text", ROWS, keys=_KEYS, fixed={**GEMMA_2, "attention.qk_norm": True},
    only={"attn_logit_softcapping": None, "final_logit_softcapping": None}, ignored=IGNORED,
    features=("zero_centered", "qk_norm"), recognized=f"{GEMMA_LIKE} qk_norm", beyond_core=("positions.local_theta",),
    assumed=lambda fields: {"embedding_scale": fields["hidden"] ** 0.5},
    proven="custom module",
)  # fmt: skip
