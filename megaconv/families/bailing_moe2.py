"""Ling 2.0 (and Ring): GLM-4.5's experts and norms on q and k under other names, q, k and v in one tensor. In no transformers release."""

from megaconv.families import Family
from megaconv.families.glm4_moe import ROUTER_BIAS, SIGMOID, UNPREDICTING
from megaconv.families.llama import IGNORED
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys, partial_rotation, rope
from megaconv.families.parts.decoder_rows import in_core, respelled
from megaconv.families.parts.expert_keys import first_dense, routed_experts, shared_experts, sigmoid_routing
from megaconv.families.parts.keys import count, flags
from megaconv.families.parts.mtp import with_mtp, without_missing
from megaconv.model.table import Fused, Spelling

_ATTENTION = "model.layers.{l}.attention."
_NAMES: dict[str, dict[str, Spelling]] = {
    "embed.weight": {"hf": "model.word_embeddings.weight"},
    "layers.{l}.attn.{q|k|v}.weight": {"hf": Fused(_ATTENTION + "query_key_value.weight")},
    "layers.{l}.attn.{q|k|v}.bias": {"hf": Fused(_ATTENTION + "query_key_value.bias")},
    "layers.{l}.attn.{q|k}_norm.weight": {"hf": _ATTENTION + "{query|key}_layernorm.weight"},
    "layers.{l}.attn.o.weight": {"hf": _ATTENTION + "dense.weight"},
    ROUTER_BIAS.canonical: {"hf": "model.layers.{l}.mlp.gate.expert_bias"},
}
_MTP_NAMES = {"mtp.{l}.final_norm.weight": {"hf": "model.layers.{l}.final_layernorm.weight"}}
PLAIN = in_core(respelled(UNPREDICTING, _NAMES))
"""Without layers for multi-token prediction."""
ROWS = respelled(with_mtp(PLAIN, hf_copies=False), _MTP_NAMES)
ONLY = {**SILU, "use_bias": False, "moe_router_enable_expert_bias": True}
_KEYS = (
    *decoder_keys(
        positions=32768, kv_heads=4, head_dim=128, ffn=5120, rotation=rope(6e5), partial=partial_rotation(1.0),
        tokens=(None, 156892, 156892),
    ),
    *routed_experts(count=256, width=512, count_key="num_experts"),
    shared_experts(count=1, width=512, key="num_shared_experts"),
    first_dense(1),
    *sigmoid_routing(scale=1.0, groups=8, group_topk=4),
    count("num_nextn_predict_layers", "mtp_layers"),
    flags("use_qkv_bias", ("attention.qkv_bias",), default=False),
    flags("use_qk_norm", ("attention.qk_norm",), default=True),
)  # fmt: skip

FAMILY = Family(
    "bailing_moe2", ("BailingMoeV2ForCausalLM",), "bailing_moe_v2", ROWS, keys=_KEYS, fixed={**LLAMA_LIKE, **SIGMOID},
    only={**ONLY, "score_function": "sigmoid"}, ignored=IGNORED, complete=without_missing, recognized=None, proven="names",
)  # fmt: skip
"""Not recognized: Megatron's arguments are a GLM 4.5's. Defaults and names: Megatron-Bridge's copy of the class, at 067f987df03b."""
