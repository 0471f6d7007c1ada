"""Hunyuan 3: GLM-4.5's experts under other names, and norms on q and k."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    MIXTURE_ROWS,
    ROUTER_BIAS,
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
    shared_experts,
)
from megaconv.families.parts.keys import count, number
from megaconv.families.parts.mtp import with_mtp, without_missing
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core, respelled

_MLP = "model.layers.{l}.mlp."
_SHARED = "shared_mlp.{gate_proj|up_proj}.weight", "shared_experts.{gate_proj|up_proj}.weight"
_NAMES = {
    "layers.{l}.mlp.router.weight": {"hf": _MLP + "router.gate.weight"},
    ROUTER_BIAS.canonical: {
        "hf": _MLP + "expert_bias",
        "hf_stacked": _MLP + "e_score_correction_bias",
    },
    "layers.{l}.mlp.shared.{gate|up}.weight": {
        "hf": _MLP + _SHARED[0],
        "hf_stacked": _MLP + _SHARED[1],
    },
    "layers.{l}.mlp.shared.down.weight": {
        "hf": _MLP + "shared_mlp.down_proj.weight",
        "hf_stacked": _MLP + "shared_experts.down_proj.weight",
    },
}
_MTP_NAMES = {"mtp.{l}.final_norm.weight": {"hf": "model.layers.{l}.final_layernorm.weight"}}
ROWS = in_core(respelled(with_mtp(respelled(MIXTURE_ROWS, _NAMES), hf_copies=False), _MTP_NAMES))
_KEYS = (
    *decoder_keys(
        positions=131072, kv_heads=8, head_dim=128, epsilon=1e-5, rotation=rope(11_158_840.0)
    ),
    *routed_experts(count=192, width=1536, count_key="num_experts"),
    shared_experts(count=1, width=1536, key="num_shared_experts"),
    mlp_layer_types(dense=1),
    number("router_scaling_factor", "experts.scale", 2.826),
    count("num_nextn_predict_layers", "mtp_layers"),
)

FAMILY = Family(
    name="hy_v3",
    architectures=("HYV3ForCausalLM",),
    model_type="hy_v3",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER, "attention.qk_norm": True},
    only={**SILU, "attention_bias": False, "mlp_bias": False},
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    complete=without_missing,
    recognized=None,
    aliases={"num_local_experts": "num_experts"},
)
"""`recognized` is None, since Megatron's arguments don't distinguish this family from GLM 4.5."""
