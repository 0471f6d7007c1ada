"""GLM-4-0414 (9B, 32B): GLM-4 with norms after its sublayers too.

Megatron core has no modules for norms after sublayers, nor has Megatron-Bridge this family; names are those that it has for others.
"""

from megaconv.families import Family
from megaconv.families.glm import GATE_UP, GLM_KEYS
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU
from megaconv.families.parts.decoder_rows import in_core, respelled
from megaconv.families.parts.norm_places import norms_at

_LAYER = norms_at(
    ATTENTION, MLP,
    before=("input_layernorm", "post_attention_layernorm"), after=("post_self_attn_layernorm", "post_mlp_layernorm"),
)  # fmt: skip
ROWS = in_core(respelled((EMBEDDING, *_LAYER, *HEAD), GATE_UP))

FAMILY = Family(
    "glm4", ("Glm4ForCausalLM",), "glm4", ROWS, keys=GLM_KEYS,
    fixed={**LLAMA_LIKE, "positions.interleaved": True, "norm.place": "both"}, only=SILU, ignored=IGNORED,
    recognized=PLAIN.replace("!interleaved", "interleaved").replace("pre_norm", "sandwich_norm !qk_norm"),
    proven="custom module",
)  # fmt: skip
