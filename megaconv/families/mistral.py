"""Mistral: Llama's tensors, and a sliding window on all layers, or on those that layer_types names."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.windows import window_or_layers

FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    model_type="mistral",
    rows=LLAMA_ROWS,
    keys=(*decoder_keys(positions=131072, kv_heads=8, tokens=(1, 2, None)), window_or_layers(4096)),
    fixed=LLAMA_LIKE,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized=f"{PLAIN} !qkv_bias !o_bias !qk_norm only_windows",
)
