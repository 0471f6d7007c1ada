"""GLM-4-0414 (9B, 32B): GLM-4 with norms also after its sublayers.

Megatron core has no modules for norms after sublayers, and Megatron-Bridge doesn't have this family. The names are
those that Megatron-Bridge uses for other families.
"""

from megaconv.families import Family
from megaconv.families.glm import GATE_UP, GLM_KEYS
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.mtp import MTP_LEFT_OUT, mtp_apart
from megaconv.families.parts.norm_places import norms_at
from megaconv.families.parts.row_changes import in_core, respelled

_LAYER = norms_at(
    ATTENTION, MLP,
    before=("input_layernorm", "post_attention_layernorm"), after=("post_self_attn_layernorm", "post_mlp_layernorm"),
)  # fmt: skip
ROWS = in_core(respelled((EMBEDDING, *_LAYER, *HEAD), GATE_UP))

FAMILY = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    model_type="glm4",
    rows=ROWS,
    keys=GLM_KEYS,
    fixed={**LLAMA_LIKE, "positions.interleaved": True, "norm.place": "both"},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    left_out=MTP_LEFT_OUT,
    other_names=mtp_apart,
    recognized=PLAIN.replace("!interleaved", "interleaved").replace(
        "pre_norm", "sandwich_norm !qk_norm"
    ),
    proven="custom module",
)
