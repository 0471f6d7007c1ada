"""OLMo 2: Llama with norms after its sublayers instead of before them, and norms of q and k over all heads.

Megatron core has no modules for either, nor has Megatron-Bridge this family; names are those that it has for others.
"""

from megaconv.families import Family
from megaconv.families.llama import ATTENTION, BIASES, EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import in_core
from megaconv.families.parts.norm_places import normed_over_all_heads, norms_at

_LAYER = norms_at(
    normed_over_all_heads(ATTENTION), MLP, before=None, after=("post_attention_layernorm", "post_feedforward_layernorm")
)
ROWS = in_core((EMBEDDING, *_LAYER, *HEAD))
OLMO_2 = {**LLAMA_LIKE, "attention.qk_norm": True, "attention.qk_norm_width": "all", "norm.place": "after"}
OLMO_LIKE = PLAIN.replace("pre_norm", "output_norm wide_qk_norm")

FAMILY = Family(
    "olmo2", ("Olmo2ForCausalLM",), "olmo2", ROWS,
    keys=(*decoder_keys(positions=2048, epsilon=1e-5, tokens=(None, 50279, 1)), BIASES), fixed=OLMO_2, only=SILU,
    ignored=IGNORED, features=("qk_norm",), recognized=f"{OLMO_LIKE} !windows",
    proven="custom module",
)  # fmt: skip
