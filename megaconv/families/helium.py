"""Helium 1: Llama with rope on pairs of neighbouring elements."""

from dataclasses import replace

from megaconv.families.ernie4_5 import FAMILY as ERNIE
from megaconv.families.parts.decoder_keys import body_keys, heads
from megaconv.families.parts.keys import flags
from megaconv.families.parts.rope import rope

_KEYS = (
    *body_keys(positions=4096, ffn=7040, epsilon=1e-8, rotation=rope(1e5), tokens=(1, 2, 3)),
    heads(20, 128, as_wide=True),
    flags("attention_bias", ("attention.qkv_bias",), default=False),
    flags("mlp_bias", ("mlp.bias",), default=False),
)

FAMILY = replace(
    ERNIE,
    name="helium",
    architectures=("HeliumForCausalLM",),
    model_type="helium",
    keys=_KEYS,
    recognized=None,
)
"""`recognized` is None, since Megatron's arguments don't distinguish this family from ERNIE 4.5."""
