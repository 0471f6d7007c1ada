"""Ministral 3: Mistral with a factor on q that grows with the position.

Megatron core has no such factor. It is 1 up to `original_max_position_embeddings` tokens.
"""

from dataclasses import replace

from megaconv.families.mistral import FAMILY as MISTRAL
from megaconv.families.parts.decoder_keys import decoder_keys
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.tempered_rope import (
    mistral_yarn,
    no_temperature_in_core,
    tempered_rope,
    usual_temperature,
)
from megaconv.families.parts.windows import window

_ROPE = tempered_rope(1e6, mistral_yarn(factor=16.0, length=16384), stated_theta=1e4)
_KEYS = (
    *decoder_keys(positions=262144, kv_heads=8, head_dim=128, epsilon=1e-5, rotation=_ROPE, tokens=(1, 2, 11)),
    window(None),
)  # fmt: skip

FAMILY = replace(
    MISTRAL, name="ministral3", architectures=("Ministral3ForCausalLM",), model_type="ministral3", rows=in_core(MISTRAL.rows),
    keys=_KEYS, recognized=None, notices=no_temperature_in_core, assumed=usual_temperature,
)  # fmt: skip
