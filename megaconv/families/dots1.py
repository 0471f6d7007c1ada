"""dots.llm1: GLM-4.5's experts and q/k norms. max_window_layers may give the last layers a window."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import (
    MIXTURE_ROWS,
    SIGMOID_ROUTER,
    first_dense,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.keys import Fields, Keys, Raw
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import (
    layer_types,
    windowed_layers,
    windows_at_the_end,
    windows_on,
)
from megaconv.model.config import ModelConfig


def _read_windows(raw: Raw) -> Fields:
    windowed = windowed_layers(raw, windows_at_the_end(raw, 62))
    return windows_on(raw, windowed, raw.get("sliding_window", 4096) or None)


def _write_windows(config: ModelConfig) -> Raw:
    first = min(config.layers_with("window"), default=config.layer_count)
    return {
        "sliding_window": config.window,
        "max_window_layers": first,
        "layer_types": layer_types(config),
    }


_KEYS = (
    *decoder_keys(positions=2048, kv_heads=32),
    *routed_experts(count=None, per_token=None, width=1408),
    shared_experts(count=0, width=1408),
    first_dense(0),
    *sigmoid_routing(scale=1.0, groups=1, group_topk=1, renormalize=False),
    Keys(("sliding_window", "max_window_layers", "layer_types"), _read_windows, _write_windows),
)

FAMILY = Family(
    name="dots1",
    architectures=("Dots1ForCausalLM",),
    model_type="dots1",
    rows=in_core(MIXTURE_ROWS),
    keys=_KEYS,
    fixed={**LLAMA_LIKE, **SIGMOID_ROUTER, "attention.qk_norm": True},
    only={**SILU, "attention_bias": False},
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=None,
    aliases={"num_local_experts": "n_routed_experts"},
)
"""`recognized` is None, since Megatron's arguments don't distinguish this family from GLM 4.5."""
