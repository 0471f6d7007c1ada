"""Qwen 3: norms on q and k, and its own head_dim."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    LLAMA_LIKE,
    PLAIN,
    SILU,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.windows import QWEN_WINDOWS

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    rows=LLAMA_ROWS,
    keys=(
        *decoder_keys(positions=32768, kv_heads=32, head_dim=128),
        QWEN_WINDOWS,
        ATTENTION_BIASES,
    ),
    fixed=LLAMA_LIKE | {"attention.qk_norm": True},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    features=("qk_norm",),
    recognized=f"{PLAIN} qk_norm !wide_qk_norm",
)
