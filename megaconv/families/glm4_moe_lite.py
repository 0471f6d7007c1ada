"""GLM-4.7-Flash: DeepSeek V3's latent attention and experts without groups."""

from megaconv.families import Family
from megaconv.families.deepseek_v3 import ROWS
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.keys import count
from megaconv.families.parts.latent_attention import LATENT_NORMS, latent_heads, one_epsilon
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
    name="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    model_type="glm4_moe_lite",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER, **LATENT_NORMS},
    only={"attention_bias": False, "rope_interleave": True, **SILU},
    ignored=ROPE_FREQUENCIES,
    features=("mla", "q_latent"),
    complete=without_missing,
    recognized=None,
    notices=one_epsilon,
    aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
)
"""`recognized` is None, since Megatron's arguments are those of DeepSeek V3, whose class computes the same."""
