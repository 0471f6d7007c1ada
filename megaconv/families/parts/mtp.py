"""Multi-token prediction: whole layers after the last, each of which predicts one token further ahead.

    hf      model.layers.61.{enorm, hnorm, eh_proj, input_layernorm, self_attn ..., shared_head.norm}    (after 61 layers)
    core    mtp.layers.0.{enorm, hnorm, eh_proj, transformer_layer..., final_layernorm}           (on the last stage)

Embedding and head are the model's own. Hugging Face's files hold both again with each such layer, Megatron's the embedding
again where the last stage isn't the first. Both join the embedding's half and the hidden state's in the same order.
Source: README_WEIGHTS.md of DeepSeek-V3; multi_token_prediction.py of megatron-core 0.16.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.table import Row, Spelling

_HF = "model.layers.{l}."
_CORE = "mtp.layers.{l}."
_NAMINGS = ("core", "core_local", "grouped", "legacy_grouped")

_OWN = (
    Row("mtp.{l}.{embed|hidden}_norm.weight", ("hidden", "hidden"), stage="mtp",
        hf=_HF + "{enorm|hnorm}.weight",
        core=_CORE + "{enorm|hnorm}.weight"),
    Row("mtp.{l}.join.weight", ("hidden 2*hidden",), tp=0, stage="mtp",
        hf=_HF + "eh_proj.weight",
        core=_CORE + "eh_proj.weight"),
    Row("mtp.{l}.final_norm.weight", ("hidden",), stage="mtp",
        hf=_HF + "shared_head.norm.weight",
        core=_CORE + "final_layernorm.weight"),
)  # fmt: skip
_COPIES = {
    "embed.weight": {
        "hf": _HF + "embed_tokens.weight",
        "core": "embedding.word_embeddings.weight",
        "core_local": "embedding.word_embeddings.weight",
    },
    "head.weight": {"hf": _HF + "shared_head.head.weight"},
}


def with_mtp(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """A table, and what its models have of these layers: each is like the last ordinary one."""
    copied = [replace(row, mtp_copy=_COPIES.get(row.canonical)) for row in rows]
    return (*copied, *_OWN, *(_as_mtp(row) for row in rows if row.stage == "layer"))


def without_missing(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """transformers keeps what config.json says of these layers, and doesn't save them: those that Hugging Face's names have."""
    first = f".layers.{config.layer_count}."
    most = len(names) + 1 if any(first in name for name in names) else 0
    return changed(config, {"mtp_layers": min(config.mtp_layers, most)})


def _as_mtp(row: Row) -> Row:
    spelled: dict[str, Any] = {name: _renamed(getattr(row, name)) for name in _NAMINGS}
    canonical = row.canonical.replace("layers.{l}.", "mtp.{l}.", 1)
    return replace(row, canonical=canonical, stage="mtp", stacked=None, **spelled)


def _renamed(spelling: Spelling | None) -> Spelling | None:
    if spelling is None:
        return None
    name = spelling if isinstance(spelling, str) else spelling.name
    name = name.replace("decoder.layers.{l}.", _CORE + "transformer_layer.", 1)
    return name if isinstance(spelling, str) else replace(spelling, name=name)
