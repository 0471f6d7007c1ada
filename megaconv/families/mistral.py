"""Mistral: Llama's tensors, and a sliding window."""

from megaconv.families import Family
from megaconv.families.llama import IGNORED, ROWS
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, PLAIN, SILU, decoder_keys, window

FAMILY = Family(
    "mistral", ("MistralForCausalLM",), "mistral", ROWS,
    keys=(*decoder_keys(positions=131072, kv_heads=8, tokens=(1, 2, None)), window(4096)),
    fixed=LLAMA_LIKE, only=SILU, ignored=IGNORED, recognized=f"{PLAIN} !qkv_bias !o_bias !qk_norm only_windows",
)  # fmt: skip
