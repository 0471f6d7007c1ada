"""Dory, of NVIDIA: a normalized transformer (nGPT) whose layers in the middle run several times.

    backbone.layers.{2l}.{mixer.{q|k|v|g|o}_proj, mixer.{sqk, s_gate}, attn_alpha}                       attention
    backbone.layers.{2l+1}.{mixer.{gate|up|down}_proj, mixer.{suv_gate, suv_up}, mlp_alpha}              the MLP
    lm_head.{weight, logit_scale}

Published files count attention and the MLP as two layers, in names and in config.json. transformers reads these names and saves
others: backbone.layers.{l}.{self_attn, mlp, lambda_1, lambda_2}. Its class has the same with model. in place of backbone. All
forms are read, and the published one is written. Megatron core has no such layers: these models are converted between Hugging
Face's files. Source: DoryConfig, modeling_dory.py and conversion_mapping.py of transformers 5.24.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.families import Family
from megaconv.families.parts.computable import require_count
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, heads, model_keys
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD
from megaconv.families.parts.key_changes import with_defaults
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    need_positive,
    need_size,
    size,
)
from megaconv.families.parts.layer_mixers import LAYER_TYPES
from megaconv.families.parts.layer_ropes import nested_layer_ropes
from megaconv.families.parts.row_changes import hf_only
from megaconv.families.parts.windows import layer_types, windows_by_layer
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

_OWN, _ATTENTION, _MLP = "layers.{l}.", "backbone.layers.{2l}.", "backbone.layers.{2l+1}."
_WIDE, _KV_WIDE = "heads*head_dim", "kv_heads*head_dim"
ROWS = hf_only((
    EMBEDDING.renamed(hf="backbone.embeddings.weight"),
    Row(_OWN + "attn.{q|gate|k|v}.weight", (f"{_WIDE} hidden", f"{_WIDE} hidden", f"{_KV_WIDE} hidden", f"{_KV_WIDE} hidden"), tp=0,
        hf=_ATTENTION + "mixer.{q_proj|g_proj|k_proj|v_proj}.weight"),
    Row(_OWN + "attn.o.weight", (f"hidden {_WIDE}",), tp=1, hf=_ATTENTION + "mixer.o_proj.weight"),
    Row(_OWN + "attn.{q_scale|gate_scale}", (_WIDE, _WIDE), tp=0, hf=_ATTENTION + "mixer.{sqk|s_gate}"),
    Row(_OWN + "attn.rate", ("hidden",), hf=_ATTENTION + "attn_alpha"),
    Row(_OWN + "mlp.{gate|up}.weight", ("ffn hidden", "ffn hidden"), tp=0, hf=_MLP + "mixer.{gate_proj|up_proj}.weight"),
    Row(_OWN + "mlp.{gate_scale|up_scale}", ("ffn", "ffn"), tp=0, hf=_MLP + "mixer.{suv_gate|suv_up}"),
    Row(_OWN + "mlp.down.weight", ("hidden ffn",), tp=1, hf=_MLP + "mixer.down_proj.weight"),
    Row(_OWN + "mlp.rate", ("hidden",), hf=_MLP + "mlp_alpha"),
    *HEAD[1:],
    Row("head.scale", ("vocab",), tp=0, stage="last", padded_vocab=True, hf="lm_head.logit_scale"),
))  # fmt: skip

_NAME = re.compile(r"(?:backbone\.)?(?:model|backbone)\.layers\.(\d+)\.(self_attn|mlp|lambda_1|lambda_2)((?:\..*)?)")  # fmt: skip
_TABLE = re.compile(r"(?:backbone\.)?(?:model|backbone)\.(?:embed_tokens|embeddings)\.weight")
_PARTS = {"self_attn": (0, "mixer"), "mlp": (1, "mixer"), "lambda_1": (0, "attn_alpha"), "lambda_2": (1, "mlp_alpha")}  # fmt: skip
"""Module of a layer -> (number of the published layer among its two, name there)."""


def _published_names(names: Collection[str]) -> Mapping[str, str]:
    """The names that transformers saves, and those of its class -> the published names."""
    found = {name: "backbone.embeddings.weight" for name in names if _TABLE.fullmatch(name)}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        layer, module, rest = match.groups()
        second, word = _PARTS[module]
        if module == "self_attn":
            rest = rest.replace(".gate_proj.", ".g_proj.")
        found[name] = f"backbone.layers.{2 * int(layer) + second}.{word}{rest}"
    return found


_COUNT, _TYPES, _RUNS = "num_hidden_layers", LAYER_TYPES, "n_recurrent_loops"
_BEFORE, _MIDDLE, _AFTER = "n_input_layers", "n_recurrent_layers", "n_output_layers"
_COUNTS = {_COUNT: 36, _BEFORE: 8, _AFTER: 8}


def _of_whole_layers(raw: Raw) -> Raw:
    """config.json with numbers of layers that have attention and an MLP. Published files count each of these as two."""
    listed: Any = raw.get(_TYPES)
    counts = {
        key: require_count(CONFIG_NAME, raw, key, default) for key, default in _COUNTS.items()
    }
    found = {**raw, **counts}
    if not isinstance(listed, list) or "mlp" not in listed:
        return found
    if set(listed[1::2]) != {"mlp"} or "mlp" in listed[::2] or len(listed) % 2:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_TYPES} should have mlp in each second place, or nowhere, found {listed!r:.100}"
        )
    doubled = {key: found[key] for key in (*counts, _MIDDLE) if found.get(key) is not None}
    odd = next((key for key, value in doubled.items() if type(value) is not int or value % 2), None)
    if odd:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {odd} is {doubled[odd]!r:.40}, but {_TYPES} counts attention and MLPs as two layers; expected an even number"
        )
    return {**found, **{key: value // 2 for key, value in doubled.items()}, _TYPES: listed[::2]}


_WINDOWS = windows_by_layer(1024, full_every=4)


def _read_layers(raw: Raw) -> Fields:
    found = _of_whole_layers(raw)
    layers, before, after = (found[key] for key in _COUNTS)
    middle = need_size(found, _MIDDLE, max(1, layers - before - after))
    if before + middle + after != layers:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_BEFORE} {before}, {_MIDDLE} {middle} and {_AFTER} {after} should add up to the number of layers, {layers}"
        )
    return {
        "layers.count": layers,
        "loops.before": before,
        "loops.after": after,
        "loops.runs": need_size(raw, _RUNS, 2),
        **_WINDOWS.read(found),
    }


def _write_layers(config: ModelConfig) -> Raw:
    loops, layers = config.loops, config.layer_count
    middle = layers - loops.before - loops.after
    return {
        **{_COUNT: 2 * layers, _BEFORE: 2 * loops.before, _MIDDLE: 2 * middle, _AFTER: 2 * loops.after},
        _RUNS: loops.runs,
        **_WINDOWS.write(config),
        _TYPES: [block for kind in layer_types(config) for block in (kind, "mlp")],
    }  # fmt: skip


_UNIT, _RATE = "initializer_range", "ngpt_alpha_init"


def _read_unit(raw: Raw) -> Fields:
    return {
        "unit_states.unit": need_positive(raw, _UNIT, 0.0177),
        "unit_states.rate": need_positive(raw, _RATE, 0.05),
    }


def _write_unit(config: ModelConfig) -> Raw:
    return {_UNIT: config.unit_states.unit, _RATE: config.unit_states.rate}


_DEFAULTS = {
    "hidden_size": 2560,
    "num_attention_heads": 16,
    "vocab_size": 131072,
}
_SIZES = (
    size("hidden_size", "hidden", 2560),
    size("intermediate_size", "mlp.ffn", 7168),
    size("max_position_embeddings", "max_positions", 8192),
    heads(4, 256),
    *model_keys(tied=False, tokens=(None, None, None)),
)
# initializer_range isn't named: in every other architecture, it changes nothing.
_KEYS = (
    *with_defaults(_SIZES, _DEFAULTS),
    Keys((*_COUNTS, _MIDDLE, _RUNS, *_WINDOWS.names), _read_layers, _write_layers),
    choice("recurrent_kv_cache_mode", "loops.caches_last", {"per_loop": False, "last_loop": True}, "per_loop"),
    nested_layer_ropes(1e7, 1e4),
    Keys((_RATE,), _read_unit, _write_unit),
)  # fmt: skip
_FIXED = {
    **LLAMA_LIKE,
    "norm.place": "both",
    "norm.weight": False,
    "norm.epsilon": 1e-6,
    "attention.output_gate": True,
}

FAMILY = Family(
    name="dory",
    architectures=("DoryForCausalLM",),
    model_type="dory",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={**SILU, "attention_bias": False, "mlp_bias": False},
    prefix="backbone.",
    other_names=_published_names,
    numbered="the runs of the layers in the middle",
    recognized=None,
    proven="names",
)
