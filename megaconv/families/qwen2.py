"""Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.windows import QWEN_WINDOWS

FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    rows=LLAMA_ROWS,
    keys=(*decoder_keys(positions=32768, kv_heads=32), QWEN_WINDOWS),
    fixed=LLAMA_LIKE | {"attention.qkv_bias": True},
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    features=("qkv_bias",),
    recognized=f"{PLAIN} qkv_alone !qk_norm",
)
