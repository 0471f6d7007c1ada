"""Qwen 1.5 and 2 MoE: Qwen 2's attention, routed experts, and a gated shared expert."""

from megaconv.families import Family
from megaconv.families.parts.computable import require_count
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, MIXTURE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.experts import (
    MOE_NORM,
    QWEN_EXPERTS,
    QWEN_SHARED,
    qwen_expert_keys,
)
from megaconv.families.parts.keys import CONFIG_NAME, Raw, flags, need_size, size
from megaconv.families.parts.windows import qwen_windows

ROWS = (EMBEDDING, *ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, *QWEN_SHARED, *HEAD)


def _every_other_layer(raw: Raw) -> list[str]:
    """The default layer_types. Unlike Qwen 2, every other layer has a window, and only before max_window_layers."""
    layers = need_size(raw, "num_hidden_layers")
    end = require_count(CONFIG_NAME, raw, "max_window_layers", 28)
    return [
        "full_attention" if layer % 2 or layer >= end else "sliding_attention"
        for layer in range(layers)
    ]


_KEYS = (
    *decoder_keys(positions=32768, kv_heads=16),
    *qwen_expert_keys(count=60, per_token=4, width=1408),
    size("shared_expert_intermediate_size", "experts.shared_ffn", 5632),
    flags("qkv_bias", ("attention.qkv_bias",), default=True),
    qwen_windows(_every_other_layer),
)

FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    model_type="qwen2_moe",
    rows=ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE | {"experts.shared_gate": True},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    features=("qkv_bias",),
    recognized=f"{MIXTURE} !sigmoid_router shared_ffn",
)
