"""Gemma 3, text-only models: Gemma 2's norms, norms of q and k, and no caps.

Five of six layers have a window and their own rope base. Megatron core has no modules for these norms and two
bases; Megatron-Bridge's Gemma 3 has them.
"""

from megaconv.families import Family
from megaconv.families.gemma2 import GEMMA_2, GEMMA_LIKE, ROWS, SANDWICHED
from megaconv.families.parts.decoder_keys import HEADS_DIVIDE_HIDDEN, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.layer_ropes import layer_ropes
from megaconv.families.parts.windows import windows_by_layer

_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
"""Keys that give the number of layers for each layer without a window, if layer_types is missing."""
_KEYS = (
    *decoder_keys(
        positions=131072,
        kv_heads=4,
        head_dim=256,
        rotation=layer_ropes(1e6, 1e4),
        tokens=(2, 1, 0),
        tied=True,
    ),
    *SANDWICHED,
    windows_by_layer(4096, full_every=6, pattern=_PATTERN),
    HEADS_DIVIDE_HIDDEN,
)

FAMILY = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    model_type="gemma3_text",
    rows=ROWS,
    keys=_KEYS,
    fixed={**GEMMA_2, "attention.qk_norm": True},
    only={"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ignored=ROPE_FREQUENCIES,
    features=("zero_centered", "qk_norm"),
    recognized=f"{GEMMA_LIKE} qk_norm",
    beyond_core=("positions.local_theta",),
    assumed=lambda fields: {"embedding_scale": fields["hidden"] ** 0.5},
    proven="custom module",
)
