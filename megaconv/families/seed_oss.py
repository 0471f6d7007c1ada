"""Seed-OSS: Llama with biases on q, k and v, and its own head size."""

from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, decoder_keys
from megaconv.families.parts.decoder_rows import LLAMA_ROWS, ROPE_FREQUENCIES
from megaconv.families.parts.keys import flags
from megaconv.families.parts.row_changes import in_core

_KEYS = (
    *decoder_keys(positions=524288, kv_heads=8, head_dim=128, tokens=(0, 2, 1)),
    flags("attention_bias", ("attention.qkv_bias",), default=True),
    flags("attention_out_bias", ("attention.o_bias",), default=False),
    flags("mlp_bias", ("mlp.bias",), default=False),
)

FAMILY = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    model_type="seed_oss",
    rows=in_core(LLAMA_ROWS),
    keys=_KEYS,
    fixed=LLAMA_LIKE,
    only=SILU,
    ignored=ROPE_FREQUENCIES,
    recognized=None,
)
"""`recognized` is None, since Megatron's arguments don't distinguish this family from Qwen 2."""
