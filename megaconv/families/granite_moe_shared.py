"""Granite 3 with experts and a shared expert in every layer."""

from dataclasses import replace

from megaconv.families.granite_moe import FAMILY as GRANITE_MOE
from megaconv.families.granite_moe import KEYS
from megaconv.families.parts.granite import SHARED_WIDTH

FAMILY = replace(
    GRANITE_MOE, name="granite_moe_shared", architectures=("GraniteMoeSharedForCausalLM",), model_type="granitemoeshared",
    keys=(*KEYS, SHARED_WIDTH),
)  # fmt: skip
