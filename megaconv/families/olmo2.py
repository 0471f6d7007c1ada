"""OLMo 2: Llama with norms after its sublayers instead of before them, and norms of q and k over all heads.

Megatron core has no modules for either, and Megatron-Bridge doesn't have this family. The names are those that
Megatron-Bridge uses for other families.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    LLAMA_LIKE,
    PLAIN,
    SILU,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.norm_places import normed_over_all_heads, norms_at
from megaconv.families.parts.row_changes import in_core

_LAYER = norms_at(
    normed_over_all_heads(ATTENTION),
    MLP,
    before=None,
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
)
ROWS = in_core((EMBEDDING, *_LAYER, *HEAD))
OLMO_2 = {
    **LLAMA_LIKE,
    "attention.qk_norm": True,
    "attention.qk_norm_width": "all",
    "norm.place": "after",
}
OLMO_LIKE = PLAIN.replace("pre_norm", "output_norm wide_qk_norm")

FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    model_type="olmo2",
    rows=ROWS,
    keys=(*decoder_keys(positions=2048, epsilon=1e-5, tokens=(None, 50279, 1)), ATTENTION_BIASES),
    fixed=OLMO_2,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=f"{OLMO_LIKE} !windows",
    proven="custom module",
)
