"""Granite with attention sinks, windows on three of four layers, and layers without rope."""

from dataclasses import replace

from megaconv.families.granite import FAMILY as GRANITE
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, GATED_SILU, decoder_keys
from megaconv.families.parts.decoder_rows import SINKS
from megaconv.families.parts.granite import FACTORS, SINKS_AND_WINDOWS
from megaconv.families.parts.keys import (
    flags,
)
from megaconv.families.parts.row_changes import in_core

_KEYS = (
    *decoder_keys(
        positions=8192, kv_heads=4, ffn=8192, epsilon=1e-5, tied=True, tokens=(100257, 100257, None)
    ),
    GATED_SILU,
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    *FACTORS,
    *SINKS_AND_WINDOWS,
)

FAMILY = replace(
    GRANITE, name="granite_swa", architectures=("GraniteSWAForCausalLM",), model_type="granite_swa",
    rows=(*in_core(GRANITE.rows), SINKS), keys=_KEYS, fixed={**GRANITE.fixed, "attention.sinks": True},
)  # fmt: skip
