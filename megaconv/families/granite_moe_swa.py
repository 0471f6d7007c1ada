"""Granite with experts, attention sinks, windows on three of four layers, and layers without rope."""

from dataclasses import replace

from megaconv.families.granite_moe import FAMILY as GRANITE_MOE
from megaconv.families.granite_moe import KEYS
from megaconv.families.parts.decoder_rows import SINKS
from megaconv.families.parts.granite import SHARED_WIDTH, SINKS_AND_WINDOWS
from megaconv.families.parts.row_changes import in_all_forms
from megaconv.model.table import Spelling, Stacked

_MIXTURE = "model.layers.{l}.block_sparse_moe."
_NAMES: dict[str, Spelling] = {
    "layers.{l}.mlp.router.weight": _MIXTURE + "router.weight",
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": Stacked(_MIXTURE + "experts.gate_up_proj"),
    "layers.{l}.mlp.experts.{e}.down.weight": Stacked(_MIXTURE + "experts.down_proj"),
}

FAMILY = replace(
    GRANITE_MOE, name="granite_moe_swa", architectures=("GraniteMoeSWAForCausalLM",), model_type="granitemoe_swa",
    rows=(*in_all_forms(GRANITE_MOE.rows, _NAMES), SINKS), fixed={**GRANITE_MOE.fixed, "attention.sinks": True},
    keys=(*KEYS, SHARED_WIDTH, *SINKS_AND_WINDOWS),
)  # fmt: skip
