"""DeciLM, as in Llama-Nemotron Super and Ultra: Llama's layers, each with sizes of its own, and without attention or MLP in
some layers.

No release of transformers contains this architecture. Names and defaults come from the repository
nvidia/Llama-3_3-Nemotron-Super-49B-v1 (modeling_decilm.py and configuration_decilm.py). A layer without attention has no
norm before it, and a layer without MLP has none either. Megatron core describes such layers in a file of its own
(heterogeneous_layers_config), which megaconv doesn't write: the models are converted between Hugging Face's files, and
trained; core's names are those of the trainer's checkpoints.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.llama import FAMILY as LLAMA
from megaconv.families.parts.decoder_keys import multi_head
from megaconv.families.parts.decoder_rows import ATTENTION, EMBEDDING, MLP
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    need_number,
    need_size,
    require_each_layer,
)
from megaconv.families.parts.mamba_and_mlp import ends, rows_of
from megaconv.families.parts.row_changes import in_core
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.subjects import LayerKind

ROWS = in_core((EMBEDDING, *rows_of("attention", ATTENTION), *MLP, *ends("model.norm.weight")))

_BLOCKS, _GROUP, _NO_OP = "block_configs", "n_heads_in_group", "no_op"
_MULTIPLE = 256
"""Widths of MLPs are rounded up to a multiple of this number."""
_KNOWN = {
    "attention": (_GROUP, _NO_OP),
    "ffn": ("ffn_mult", "intermediate_size", "hidden_act", "gated", _NO_OP),
}
"""Part of a block -> its supported keys. All other keys have to be off."""


def _part(block: Any, name: str, layer: int) -> Mapping[str, Any]:
    """One part of a block. Raises CorruptCheckpoint if it is missing, and NotExpressible for unsupported parts."""
    part = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(part, Mapping):
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {_BLOCKS} has no {name} for layer {layer}")
    on = [key for key, value in part.items() if value and key not in _KNOWN[name]]
    on += [
        key
        for key, usual in (("hidden_act", "silu"), ("gated", True))
        if part.get(key, usual) != usual
    ]
    if on:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_BLOCKS} has {name}.{on[0]} {part[on[0]]!r} in layer {layer}, which is not supported"
        )
    return part


def _kv_heads(attention: Mapping[str, Any], heads: int) -> int | None:
    """The key/value heads of a layer; None without attention."""
    if attention.get(_NO_OP):
        return None
    group = need_size(attention, _GROUP)
    if heads % group:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_GROUP} {group} doesn't divide num_attention_heads {heads}"
        )
    return heads // group


def _width(ffn: Mapping[str, Any], hidden: int) -> int | None:
    """The width of a layer's MLP; None without an MLP."""
    if ffn.get(_NO_OP):
        return None
    if ffn.get("intermediate_size") is not None:
        return need_size(ffn, "intermediate_size")
    whole = int(2 * need_number(ffn, "ffn_mult", 0.0) * hidden / 3)
    return -(-whole // _MULTIPLE) * _MULTIPLE


def _read_blocks(raw: Raw) -> Fields:
    layers, hidden = need_size(raw, "num_hidden_layers"), need_size(raw, "hidden_size")
    blocks = raw.get(_BLOCKS)
    if not isinstance(blocks, list):
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {_BLOCKS} should be a list, found {blocks!r:.40}")
    require_each_layer(_BLOCKS, blocks, layers)
    heads = need_size(raw, "num_attention_heads")
    kv_heads, widths = [], []
    for layer, block in enumerate(blocks):
        kv_heads.append(_kv_heads(_part(block, "attention", layer), heads))
        widths.append(_width(_part(block, "ffn", layer), hidden))
    most_heads = max((count for count in kv_heads if count), default=heads)
    widest = max((width for width in widths if width), default=_MULTIPLE)
    return {
        "attention.kv_heads": most_heads,
        "mlp.ffn": widest,
        "layers.mixer": one_or_each(tuple("attention" if count else "none" for count in kv_heads)),
        "layers.mlp": one_or_each(tuple("dense" if width else "none" for width in widths)),
        "layers.kv_heads": _own(kv_heads, most_heads),
        "layers.ffn": _own(widths, widest),
    }


def _own(sizes: list[int | None], usual: int) -> Any:
    """The field of layers with these sizes. A layer with the usual size, or without the part, has none of its own."""
    return one_or_each(tuple(None if size == usual else size for size in sizes))


def _write_blocks(config: ModelConfig) -> Raw:
    blocks = [
        {"attention": _attention_of(config, kind), "ffn": _ffn_of(config, kind)}
        for kind in config.layers
    ]
    return {_BLOCKS: blocks}


def _attention_of(config: ModelConfig, kind: LayerKind) -> dict[str, Any]:
    if kind.mixer != "attention":
        return {_GROUP: None, _NO_OP: True, "replace_with_linear": False}
    kv_heads = kind.kv_heads or config.attention.kv_heads
    group = config.attention.heads // kv_heads
    return {_GROUP: group, _NO_OP: False, "replace_with_linear": False}


def _ffn_of(config: ModelConfig, kind: LayerKind) -> dict[str, Any]:
    """The description of a layer's MLP. Raises NotExpressible for a width that no multiplier gives."""
    if kind.mlp == "none":
        return {"ffn_mult": None, _NO_OP: True, "replace_with_linear": False}
    width = kind.ffn or config.mlp.ffn
    if width % _MULTIPLE:
        raise NotExpressible(
            f"the model has an MLP of width {width} (mlp.ffn, layers.ffn); {_BLOCKS} has multiples of {_MULTIPLE} only"
        )
    factor = 3 * width / (2 * config.hidden)
    return {"ffn_mult": factor, _NO_OP: False, "replace_with_linear": False}


_OWN_KEYS = (
    multi_head("num_attention_heads", "hidden_size"),
    Keys((_BLOCKS,), _read_blocks, _write_blocks),
)
_USUAL = without_keys(LLAMA.keys, "intermediate_size", "num_attention_heads")

FAMILY = replace(
    LLAMA, name="nemotron_nas", architectures=("DeciLMForCausalLM",), model_type="nemotron-nas", other_types=("deci",), rows=ROWS,
    keys=(*_USUAL, *_OWN_KEYS), only={"intermediate_size": None, "num_key_value_heads": None}, recognized=None, proven="names",
)  # fmt: skip
