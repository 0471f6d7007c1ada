"""Aria, text only: Llama with experts and shared experts in every layer; the experts' matrices are stored as [in, out]."""

from dataclasses import replace

from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import (
    ATTENTION_BIASES,
    HEADS_DIVIDE_HIDDEN,
    SILU,
    decoder_keys,
)
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, HEAD
from megaconv.families.parts.experts import MOE_NORM, expert_rows, shared_expert_rows
from megaconv.families.parts.keys import Fields, Keys, Raw, need_size, size
from megaconv.families.parts.row_changes import in_all_forms, in_core
from megaconv.model.config import ModelConfig
from megaconv.model.table import Spelling, StackedTransposed

_MLP = "model.layers.{l}.mlp."
_NAMES: dict[str, Spelling] = {
    "layers.{l}.mlp.router.weight": _MLP + "router.weight",
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": StackedTransposed(_MLP + "experts.fc1.weight", "experts hidden 2*moe_ffn"),
    "layers.{l}.mlp.experts.{e}.down.weight": StackedTransposed(_MLP + "experts.fc2.weight", "experts moe_ffn hidden"),
}  # fmt: skip
_SHARED = shared_expert_rows(
    "mlp.shared_experts.{gate_proj|up_proj}.weight", "mlp.shared_experts.down_proj.weight"
)
_EXPERTS = (*in_all_forms(expert_rows("", "{|}", ""), _NAMES), *_SHARED)
_SHARES = "moe_num_shared_experts"


def _read_widths(raw: Raw) -> Fields:
    width = need_size(raw, "intermediate_size", 4096)
    shared = width * need_size(raw, _SHARES, 2)
    return {"mlp.ffn": width, "experts.ffn": width, "experts.shared_ffn": shared}


def _write_widths(config: ModelConfig) -> Raw:
    experts = config.experts
    return {"intermediate_size": experts.ffn, _SHARES: experts.shared_ffn // max(1, experts.ffn)}


_KEYS = (
    *decoder_keys(positions=2048, tokens=(1, 2, 2)),
    ATTENTION_BIASES,
    Keys(("intermediate_size", _SHARES), _read_widths, _write_widths),
    size("moe_num_experts", "experts.count", 8),
    size("moe_topk", "experts.per_token", 2),
    HEADS_DIVIDE_HIDDEN,
)

FAMILY = replace(
    LLAMA, name="aria_text", architectures=("AriaTextForCausalLM",), model_type="aria_text",
    rows=in_core((EMBEDDING, *ATTENTION, MOE_NORM, *_EXPERTS, *HEAD)), keys=_KEYS,
    fixed={**LLAMA.fixed, "layers.mlp": "experts"}, only={**SILU, "mlp_bias": False}, recognized=None,
)  # fmt: skip
