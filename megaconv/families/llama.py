"""Llama 1, 2, 3, 3.1, 3.2, 3.3 and all other models with the class LlamaForCausalLM."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    GATED_SILU,
    HEADS_DIVIDE_HIDDEN,
    LLAMA_LIKE,
    PLAIN,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import flags

_KEYS = (
    *decoder_keys(positions=2048, tokens=(1, 2, None)),
    GATED_SILU,
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    HEADS_DIVIDE_HIDDEN,
)

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    model_type="llama",
    rows=LLAMA_ROWS,
    keys=_KEYS,
    fixed=LLAMA_LIKE,
    ignored=ROPE_FREQUENCIES,
    # A Megatron checkpoint may have norms of weight + 1, which config.json can't express.
    recognized=f"{PLAIN.replace(' !zero_centered', '')} !qkv_alone !qk_norm !only_windows",
)
