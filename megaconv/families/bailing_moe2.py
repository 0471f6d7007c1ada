"""Ling 2.0 and Ring: GLM-4.5's experts and q/k norms under other names, with q, k and v in one tensor.

No release of transformers contains this architecture.
"""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    MIXTURE_ROWS,
    ROUTER_BIAS,
    SIGMOID_ROUTER,
    first_dense,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.keys import count, flags
from megaconv.families.parts.mtp import with_mtp, without_missing
from megaconv.families.parts.rope import partial_rotation, rope
from megaconv.families.parts.row_changes import in_core, respelled
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
PLAIN = in_core(respelled(MIXTURE_ROWS, _NAMES))
"""The table without layers for multi-token prediction (MTP)."""
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
    name="bailing_moe2",
    architectures=("BailingMoeV2ForCausalLM",),
    model_type="bailing_moe_v2",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER},
    only={**ONLY, "score_function": "sigmoid"},
    ignored=ROPE_FREQUENCIES,
    complete=without_missing,
    recognized=None,
    proven="names",
)
"""`recognized` is None, since Megatron's arguments don't distinguish this family from GLM 4.5. Defaults and names come
from Megatron-Bridge's copy of the class, at 067f987df03b."""
