"""DeepSeek V3, R1, Kimi K2, Moonlight and all other models of this class.

They have latent attention, dense first layers, experts with sigmoid routing, shared experts, and MTP.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_MLPS,
    SIGMOID_ROUTER,
    first_dense,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.keys import count
from megaconv.families.parts.latent_attention import (
    LATENT_ATTENTION,
    LATENT_HEADS,
    LATENT_NORMS,
    one_epsilon,
)
from megaconv.families.parts.mtp import with_mtp, without_missing

WITHOUT_MTP = (EMBEDDING, *LATENT_ATTENTION, *DEEPSEEK_MLPS, *HEAD)
"""The table without layers for multi-token prediction (MTP)."""
ROWS = with_mtp(WITHOUT_MTP)

_KEYS = (
    *body_keys(positions=4096, tokens=(0, 1, None)),
    LATENT_HEADS,
    *routed_experts(count=256, width=2048),
    shared_experts(count=1, width=2048),
    first_dense(3),
    *sigmoid_routing(scale=2.5, groups=8, group_topk=4),
    count("num_nextn_predict_layers", "mtp_layers", 1),
)
_ONLY = {
    "attention_bias": False,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    **SILU,
}

FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    model_type="deepseek_v3",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER, **LATENT_NORMS},
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    features=("mla", "q_latent"),
    complete=without_missing,
    recognized="mla mixture sigmoid_router router_bias !indexer",
    other_types=("kimi_k2",),
    notices=one_epsilon,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
