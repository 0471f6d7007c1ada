"""OLMoE: Qwen's keys for experts in every layer, and norms of q and k over all heads.

Megatron core has no modules for these norms. Megatron-Bridge's OLMoE has them for one tensor-parallel rank, and its
MiniMax M2 for several.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    LLAMA_LIKE,
    MIXTURE,
    SILU,
    body_keys,
    heads,
)
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.experts import EXPERTS_WIDTH, MOE_NORM, QWEN_EXPERTS
from megaconv.families.parts.keys import flags, size
from megaconv.families.parts.norm_places import normed_over_all_heads
from megaconv.families.parts.row_changes import in_core

ROWS = in_core(normed_over_all_heads((EMBEDDING, *ATTENTION, MOE_NORM, *QWEN_EXPERTS, *HEAD)))

_KEYS = (
    *body_keys(positions=4096, epsilon=1e-5, tokens=(None, 50279, 1)),
    heads(None, as_wide=True),
    ATTENTION_BIASES,
    EXPERTS_WIDTH,
    size("num_experts", "experts.count", 64),
    size("num_experts_per_tok", "experts.per_token", 8),
    flags("norm_topk_prob", ("experts.renormalize",), default=False),
)
_FIXED = {"attention.qk_norm": True, "attention.qk_norm_width": "all", "layers.mlp": "experts"}

FAMILY = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    model_type="olmoe",
    rows=ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE | _FIXED,
    only={**SILU, "clip_qkv": None},
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=f"{MIXTURE} !sigmoid_router !shared_ffn wide_qk_norm",
    proven="custom module",
    aliases={"num_local_experts": "num_experts"},
)
