"""GLM 4.5 and later: grouped-query attention, dense first layers, then experts routed as DeepSeek's are."""

from megaconv.families import Family
from megaconv.families.llama import ATTENTION, EMBEDDING, HEAD, IGNORED, MLP
from megaconv.families.mixtral import MOE_NORM, shared_expert_rows
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys, partial_rotation
from megaconv.families.parts.expert_keys import first_dense, routed_experts, shared_experts, sigmoid_routing
from megaconv.families.parts.keys import Fields, count, flags
from megaconv.families.parts.mtp import with_mtp, without_missing
from megaconv.families.qwen2_moe import QWEN_EXPERTS
from megaconv.model.table import Row

ROUTER_BIAS = Row(
    "layers.{l}.mlp.router.bias", ("experts",), when="moe router_bias",
    hf="model.layers.{l}.mlp.gate.e_score_correction_bias",
    core="decoder.layers.{l}.mlp.router.expert_bias",
)  # fmt: skip
SHARED = shared_expert_rows("mlp.shared_experts.{gate_proj|up_proj}.weight", "mlp.shared_experts.down_proj.weight")
UNPREDICTING = (EMBEDDING, *ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, ROUTER_BIAS, *SHARED, *HEAD)
"""Without layers that predict further tokens."""
ROWS = with_mtp(UNPREDICTING)

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
SIGMOID: Fields = {"experts.score": "sigmoid", "experts.router_bias": True}
"""Of the router."""

FAMILY = Family(
    "glm4_moe", ("Glm4MoeForCausalLM",), "glm4_moe", ROWS, keys=_KEYS, fixed={**LLAMA_LIKE, **SIGMOID}, only=SILU,
    ignored=IGNORED, complete=without_missing, recognized=f"{MIXTURE} sigmoid_router !wide_qk_norm",
)  # fmt: skip
