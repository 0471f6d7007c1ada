"""GLM 4.5 and later: grouped-query attention, dense first layers, then experts routed as in DeepSeek."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    MIXTURE_ROWS,
    SIGMOID_ROUTER,
    first_dense,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.keys import count, flags
from megaconv.families.parts.mtp import with_mtp, without_missing
from megaconv.families.parts.rope import partial_rotation

ROWS = with_mtp(MIXTURE_ROWS)
_KEYS = (
    *decoder_keys(positions=131072, kv_heads=8, epsilon=1e-5, partial=partial_rotation(0.5)),
    *routed_experts(count=128, width=1408),
    shared_experts(count=1, width=1408),
    first_dense(1),
    *sigmoid_routing(scale=1.0, groups=1, group_topk=1),
    flags("attention_bias", ("attention.qkv_bias",), default=False),
    flags("use_qk_norm", ("attention.qk_norm",), default=False),
    count("num_nextn_predict_layers", "mtp_layers"),
)

FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    complete=without_missing,
    recognized=f"{MIXTURE} sigmoid_router !wide_qk_norm",
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
