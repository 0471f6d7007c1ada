"""GLM-4-0414 (9B, 32B): norms before and after sublayers, half of each head rotating as neighbours, gate and up in one tensor.

Megatron core has no modules for norms after sublayers, nor has Megatron-Bridge this family; names are those that it has for others.
"""

from megaconv.families import Family
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.parts.decoder_words import LLAMA_LIKE, PLAIN, SILU, decoder_words, partial_rotation
from megaconv.families.parts.norm_places import norms_at
from megaconv.families.parts.words import flags
from megaconv.model.table import Fused

_LAYER = norms_at(
    ATTENTION, MLP,
    before=("input_layernorm", "post_attention_layernorm"), after=("post_self_attn_layernorm", "post_mlp_layernorm"),
)  # fmt: skip
_FUSED = {"layers.{l}.mlp.{gate|up}.weight": Fused("model.layers.{l}.mlp.gate_up_proj.weight")}
_ROWS = (EMBEDDING, *_LAYER, *HEAD)
ROWS = tuple(row.renamed(hf=_FUSED.get(row.canonical, row.names["hf"])).without("legacy", "meta") for row in _ROWS)

_TOKENS = (None, (151329, 151336, 151338), 151329)
_WORDS = (
    *decoder_words(
        positions=131072, kv_heads=2, head_dim=128, epsilon=1.5625e-07, partial=partial_rotation(0.5), tokens=_TOKENS
    ),
    flags("attention_bias", ("attention.qkv_bias",), default=True),
)

FAMILY = Family(
    "glm4", ("Glm4ForCausalLM",), "glm4", ROWS, words=_WORDS,
    fixed={**LLAMA_LIKE, "positions.interleaved": True, "norm.place": "both"}, only=SILU, ignored=IGNORED,
    recognized=PLAIN.replace("!interleaved", "interleaved").replace("pre_norm", "sandwich_norm !qk_norm"),
)  # fmt: skip
