"""Qwen 3 MoE: Qwen 3's attention, and routed experts without a shared expert."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    LLAMA_LIKE,
    MIXTURE,
    SILU,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD, MLP, ROPE_FREQUENCIES
from megaconv.families.parts.experts import MOE_NORM, QWEN_EXPERTS, qwen_expert_keys
from megaconv.families.parts.keys import Fields, Keys, Raw

ROWS = (EMBEDDING, *ATTENTION, MOE_NORM, *MLP, *QWEN_EXPERTS, *HEAD)


def _window(raw: Raw) -> Fields:
    return (
        {"layers.window": raw.get("sliding_window", 4096) or None}
        if raw.get("use_sliding_window")
        else {}
    )


_KEYS = (
    *decoder_keys(positions=32768, kv_heads=4),
    *qwen_expert_keys(count=128, per_token=8, width=768),
    ATTENTION_BIASES,
    Keys(
        ("use_sliding_window", "sliding_window"),
        _window,
        lambda config: {
            "use_sliding_window": config.window is not None,
            "sliding_window": config.window,
        },
    ),
)

FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    rows=ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE | {"attention.qk_norm": True},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=f"{MIXTURE} !sigmoid_router !shared_ffn qk_norm !wide_qk_norm",
)
