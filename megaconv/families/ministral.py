"""Ministral 8B: Mistral with a window on some layers."""

from dataclasses import replace

from megaconv.families.mistral import FAMILY as MISTRAL
from megaconv.families.parts.decoder_keys import decoder_keys
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import windows_by_layer

_KEYS = decoder_keys(positions=131072, kv_heads=8, tokens=(1, 2, None))

FAMILY = replace(
    MISTRAL, name="ministral", architectures=("MinistralForCausalLM",), model_type="ministral", rows=in_core(MISTRAL.rows),
    keys=(*_KEYS, windows_by_layer(4096, full_every=None)), recognized=None,
)  # fmt: skip
"""`recognized` is None, since Megatron's arguments don't distinguish this family from Llama and Mistral."""
