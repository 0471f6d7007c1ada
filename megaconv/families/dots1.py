"""dots.llm1: GLM-4.5's experts and norms on q and k; windows on the last layers where max_window_layers says so."""

from megaconv.families import Family
from megaconv.families.glm4_moe import SIGMOID, UNPREDICTING
from megaconv.families.llama import IGNORED
from megaconv.families.parts.decoder_keys import (
    LLAMA_LIKE,
    SILU,
    decoder_keys,
    layer_types,
    windowed_layers,
    windows_on,
)
from megaconv.families.parts.decoder_rows import in_core
from megaconv.families.parts.expert_keys import first_dense, routed_experts, shared_experts, sigmoid_routing
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size
from megaconv.model.config import ModelConfig


def _read_windows(raw: Raw) -> Fields:
    first, layers = raw.get("max_window_layers", 62) or 0, need_size(raw, "num_hidden_layers")
    kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return windows_on(raw, windowed_layers(raw, kinds), raw.get("sliding_window", 4096) or None)


def _write_windows(config: ModelConfig) -> Raw:
    first = min(config.layers_with("window"), default=config.layer_count)
    return {"sliding_window": config.window, "max_window_layers": first, "layer_types": layer_types(config)}


_KEYS = (
    *decoder_keys(positions=2048, kv_heads=32),
    *routed_experts(count=None, per_token=None, width=1408),
    shared_experts(count=0, width=1408),
    first_dense(0),
    *sigmoid_routing(scale=1.0, groups=1, group_topk=1, renormalize=False),
    Keys(("sliding_window", "max_window_layers", "layer_types"), _read_windows, _write_windows),
)

FAMILY = Family(
    "dots1", ("Dots1ForCausalLM",), "dots1", in_core(UNPREDICTING), keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID, "attention.qk_norm": True}, only={**SILU, "attention_bias": False}, ignored=IGNORED,
    features=("qk_norm",), recognized=None,
)  # fmt: skip
"""Not recognized: Megatron's arguments are a GLM 4.5's."""
