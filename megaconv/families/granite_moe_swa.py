"""Granite with experts, attention sinks, windows on three of four layers, and layers without rope."""

from dataclasses import replace

from megaconv.families.granite_moe import FAMILY as GRANITE_MOE
from megaconv.families.granite_moe import KEYS
from megaconv.families.granite_swa import SINKS_AND_WINDOWS
from megaconv.families.parts.decoder_rows import SINKS
from megaconv.families.parts.keys import count

FAMILY = replace(
    GRANITE_MOE, name="granite_moe_swa", architectures=("GraniteMoeSWAForCausalLM",), model_type="granitemoe_swa",
    rows=(*GRANITE_MOE.rows, SINKS), fixed={**GRANITE_MOE.fixed, "attention.sinks": True},
    keys=(*KEYS, count("shared_intermediate_size", "experts.shared_ffn"), *SINKS_AND_WINDOWS),
)  # fmt: skip
