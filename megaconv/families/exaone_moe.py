"""K-EXAONE: GLM-4.5's experts and norms on q and k. Most layers have a window; the others don't rotate."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    MIXTURE_ROWS,
    ROUTER_BIAS,
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.families.parts.row_changes import in_core, respelled
from megaconv.families.parts.windows import (
    layer_types,
    windowed_layers,
    windows_but_every,
    windows_on,
)
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer


def _read_windows(raw: Raw) -> Fields:
    """The windows and rotation of the layers. If there is a window, the layers without one don't rotate."""
    layers = need_size(raw, "num_hidden_layers")
    size = raw.get("sliding_window", 4096)
    if not size:
        return {}
    step = need_size(raw, "sliding_window_pattern", 4)
    windowed = windowed_layers(raw, windows_but_every(step, raw))
    return {
        **windows_on(raw, windowed, size),
        "layers.rotates": per_layer(windowed, layers, True, False),
    }


def _write_windows(config: ModelConfig) -> Raw:
    return {
        "sliding_window": config.window,
        "sliding_window_pattern": 4,
        "layer_types": layer_types(config),
    }


_KEYS = (
    *decoder_keys(positions=2048, kv_heads=32, epsilon=1e-5, tokens=(1, 53, 0)),
    *routed_experts(count=64, width=1024, count_key="num_experts"),
    shared_experts(count=1, width=1024, key="num_shared_experts"),
    mlp_layer_types(dense=1, older="first_k_dense_replace"),
    *sigmoid_routing(scale=2.5, groups=1, group_topk=1),
    Keys(
        ("sliding_window", "sliding_window_pattern", "layer_types"), _read_windows, _write_windows
    ),
)
_MLP = "model.layers.{l}.mlp."
_BIAS = {
    "hf": _MLP + "e_score_correction_bias",
    "hf_stacked": _MLP + "gate.e_score_correction_bias",
}
ROWS = in_core(respelled(MIXTURE_ROWS, {ROUTER_BIAS.canonical: _BIAS}))

FAMILY = Family(
    name="exaone_moe",
    architectures=("ExaoneMoeForCausalLM",),
    model_type="exaone_moe",
    rows=ROWS,
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER, "attention.qk_norm": True},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    left_out=MTP_LEFT_OUT,
    features=("qk_norm",),
    recognized=f"{MIXTURE.replace('!skips_rope', 'skips_rope')} sigmoid_router",
)
