"""DeepSeek V3.2: DeepSeek V3 with an indexer in each layer; FP8 as shipped."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_MLPS,
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.indexer import indexer_keys, sparse_attention, sparse_notices
from megaconv.families.parts.keys import count
from megaconv.families.parts.latent_attention import LATENT_HEADS, LATENT_NORMS
from megaconv.families.parts.mtp import with_mtp, without_missing

ROWS = with_mtp((EMBEDDING, *sparse_attention(halves=True), *DEEPSEEK_MLPS, *HEAD))
EXPERT_KEYS = (
    *routed_experts(count=256, width=2048),
    shared_experts(count=1, width=2048),
    mlp_layer_types(dense=3, older="first_k_dense_replace"),
    count("num_nextn_predict_layers", "mtp_layers"),
)
_KEYS = (
    *body_keys(positions=163840, tokens=(0, 1, None)),
    LATENT_HEADS,
    *EXPERT_KEYS,
    *sigmoid_routing(scale=2.5, groups=8, group_topk=4),
    *indexer_keys(heads=64),
)
ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    **SILU,
}

FAMILY = Family(
    name="deepseek_v32",
    architectures=("DeepseekV32ForCausalLM",),
    model_type="deepseek_v32",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER, **LATENT_NORMS},
    only=ONLY,
    ignored=ROPE_FREQUENCIES,
    features=("mla", "q_latent", "indexer"),
    complete=without_missing,
    recognized="mla mixture sigmoid_router router_bias indexer !interleaved_indexer",
    notices=sparse_notices,
    aliases={"num_local_experts": "n_routed_experts"},
)
