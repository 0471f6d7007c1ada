"""GLM-4.7-Flash: DeepSeek V3's latent attention and experts without groups."""

from megaconv.families import Family
from megaconv.families.deepseek_v3 import ROWS, latent_heads, one_epsilon
from megaconv.families.glm4_moe import SIGMOID
from megaconv.families.llama import IGNORED
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.expert_keys import mlp_layer_types, routed_experts, shared_experts, sigmoid_routing
from megaconv.families.parts.keys import count
from megaconv.families.parts.mtp import without_missing

_KEYS = (
    *body_keys(positions=202752, epsilon=1e-5, tokens=(0, 1, None)),
    latent_heads(kv_rank=512, q_rank=768, rope=64, nope=192, v=256),
    *routed_experts(count=64, per_token=4, width=1536),
    shared_experts(count=1, width=1536),
    mlp_layer_types(dense=1),
    *sigmoid_routing(scale=1.8, groups=1, group_topk=1),
    count("num_nextn_predict_layers", "mtp_layers"),
)

FAMILY = Family(
    "glm4_moe_lite", ("Glm4MoeLiteForCausalLM",), "glm4_moe_lite", ROWS, keys=_KEYS, fixed={**LLAMA_LIKE, **SIGMOID},
    only={"attention_bias": False, "rope_interleave": True, **SILU}, ignored=IGNORED, features=("mla", "q_latent"),
    complete=without_missing, recognized=None, notices=one_epsilon,
)  # fmt: skip
"""Not recognized: Megatron's arguments are a DeepSeek V3's, whose class computes the same."""
