"""The language model of Muse Glimmer: gated attention, norms before and after sublayers, and some norms without weights.

transformers has a class of the language model without a head. Megatron core has no such norms: these models are converted
between Hugging Face's files.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_rows import MLP, ROPE_FREQUENCIES
from megaconv.families.parts.headless import tied_without
from megaconv.families.parts.muse import MUSE, muse_keys, muse_rows
from megaconv.families.parts.row_changes import without_biases

FAMILY = Family(
    name="muse_glimmer_text",
    architectures=("MuseGlimmerTextModel",),
    model_type="muse_glimmer_text",
    rows=muse_rows(without_biases(MLP)),
    keys=muse_keys(
        ffn=19968, kv_heads=2, head_dim=128, positions=131072, theta=1e4, query=3.87, logits=0.19611613513818404
    ),
    fixed=MUSE,
    only={"hidden_activation": "silu", "attention_bias": False},
    ignored=ROPE_FREQUENCIES,
    complete=tied_without("lm_head.weight"),
    features=("output_gate",),
    prefix="model.",
    recognized=None,
    proven="names",
)  # fmt: skip
