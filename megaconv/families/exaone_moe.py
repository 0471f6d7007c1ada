"""K-EXAONE: GLM-4.5's experts, norms on q and k; windows on most layers, and no rotation on the others."""

from megaconv.families import Family
from megaconv.families.glm4_moe import ROUTER_BIAS, SIGMOID, UNPREDICTING
from megaconv.families.llama import IGNORED
from megaconv.families.parts.decoder_keys import (
    LLAMA_LIKE,
    MIXTURE,
    SILU,
    decoder_keys,
    layer_types,
    windowed_layers,
    windows_on,
)
from megaconv.families.parts.decoder_rows import in_core, respelled
from megaconv.families.parts.expert_keys import mlp_layer_types, routed_experts, shared_experts, sigmoid_routing
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer


def _read_windows(raw: Raw) -> Fields:
    """Where there is a window, layers without one don't rotate."""
    layers, size = need_size(raw, "num_hidden_layers"), raw.get("sliding_window", 4096)
    if not size:
        return {}
    step = need_size(raw, "sliding_window_pattern", 4)
    windowed = windowed_layers(
        raw, ["sliding_attention" if (layer + 1) % step else "full_attention" for layer in range(layers)]
    )
    return {**windows_on(raw, windowed, size), "layers.rotates": per_layer(windowed, layers, True, False)}


def _write_windows(config: ModelConfig) -> Raw:
    return {"sliding_window": config.window, "sliding_window_pattern": 4, "layer_types": layer_types(config)}


_KEYS = (
    *decoder_keys(positions=2048, kv_heads=32, epsilon=1e-5, tokens=(1, 53, 0)),
    *routed_experts(count=64, width=1024, count_key="num_experts"),
    shared_experts(count=1, width=1024, key="num_shared_experts"),
    mlp_layer_types(dense=1, older="first_k_dense_replace"),
    *sigmoid_routing(scale=2.5, groups=1, group_topk=1),
    Keys(("sliding_window", "sliding_window_pattern", "layer_types"), _read_windows, _write_windows),
)
_MLP = "model.layers.{l}.mlp."
_BIAS = {"hf": _MLP + "e_score_correction_bias", "hf_stacked": _MLP + "gate.e_score_correction_bias"}
ROWS = in_core(respelled(UNPREDICTING, {ROUTER_BIAS.canonical: _BIAS}))

FAMILY = Family(
    "exaone_moe", ("ExaoneMoeForCausalLM",), "exaone_moe", ROWS, keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID, "attention.qk_norm": True}, only=SILU, ignored=IGNORED, left_out=MTP_LEFT_OUT,
    features=("qk_norm",), recognized=f"{MIXTURE.replace('!skips_rope', 'skips_rope')} sigmoid_router",
)  # fmt: skip
