"""The language model of MiniMax M3: GPT-OSS's activation, experts as in MiniMax M2, and attention to selected blocks of keys.

In most layers, an indexer with small heads scores every key, takes the best score of each block of keys, and selects the
blocks that a token attends to. The published files name tensors as MiniMax M2 does, with each expert apart. transformers'
class of the language model joins them:

    hf            model.layers.{l}.mlp.{gate_up_proj, gate, experts.gate_up_proj, shared_experts}, self_attn.indexer
    hf_separate   model.layers.{l}.mlp.gate_proj, block_sparse_moe.{gate, experts.{e}.w1, shared_experts}, self_attn.index_q_proj

Megatron core has no such indexer. These models are converted between Hugging Face's files only. Layers for multi-token
prediction are left out.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, decoder_keys
from megaconv.families.parts.decoder_rows import ROPE_FREQUENCIES
from megaconv.families.parts.deepseek_experts import MIXTURE_ROWS, ROUTER_BIAS, SIGMOID_ROUTER
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    need_size,
    number,
    require_each_layer,
    size,
)
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.families.parts.rope import rope, rotary_percent
from megaconv.families.parts.row_changes import hf_only, respelled, without_biases
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Fused, Row, Stacked

_HF = "model.layers.{l}."
_MLP, _MOE, _ATTENTION = _HF + "mlp.", _HF + "block_sparse_moe.", _HF + "self_attn."
_NAMES: dict[str, dict[str, Any]] = {
    "layers.{l}.mlp.{gate|up}.weight": {
        "hf": Fused(_MLP + "gate_up_proj.weight"),
        "hf_separate": _MLP + "{gate|up}_proj.weight",
    },
    "layers.{l}.mlp.router.weight": {"hf": _MLP + "gate.weight", "hf_separate": _MOE + "gate.weight"},
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": {
        "hf": Stacked(_MLP + "experts.gate_up_proj"),
        "hf_separate": _MOE + "experts.{e}.{w1|w3}.weight",
    },
    "layers.{l}.mlp.experts.{e}.down.weight": {
        "hf": Stacked(_MLP + "experts.down_proj"),
        "hf_separate": _MOE + "experts.{e}.w2.weight",
    },
    "layers.{l}.mlp.shared.{gate|up}.weight": {
        "hf": Fused(_MLP + "shared_experts.gate_up_proj.weight"),
        "hf_separate": _MOE + "shared_experts.{gate_proj|up_proj}.weight",
    },
    "layers.{l}.mlp.shared.down.weight": {
        "hf": _MLP + "shared_experts.down_proj.weight",
        "hf_separate": _MOE + "shared_experts.down_proj.weight",
    },
    ROUTER_BIAS.canonical: {
        "hf": _MLP + "gate.e_score_correction_bias",
        "hf_separate": _MOE + "e_score_correction_bias",
    },
}  # fmt: skip
_INDEXER = (
    Row("layers.{l}.attn.indexer.q.weight", ("block_heads*block_dim hidden",), when="indexed",
        hf=_ATTENTION + "indexer.q_proj.weight", hf_separate=_ATTENTION + "index_q_proj.weight"),
    Row("layers.{l}.attn.indexer.k.weight", ("block_dim hidden",), when="indexed",
        hf=_ATTENTION + "indexer.k_proj.weight", hf_separate=_ATTENTION + "index_k_proj.weight"),
    Row("layers.{l}.attn.indexer.{q|k}_norm.weight", ("block_dim", "block_dim"), when="indexed",
        hf=_ATTENTION + "indexer.{q|k}_norm.weight", hf_separate=_ATTENTION + "index_{q|k}_norm.weight"),
)  # fmt: skip
ROWS = hf_only((*respelled((*without_biases(MIXTURE_ROWS), ROUTER_BIAS), _NAMES), *_INDEXER))

_TYPES, _SPARSE, _MLPS, _FREQUENCY = "layer_types", "sparse_attention_config", "mlp_layer_types", "moe_layer_freq"  # fmt: skip
_WORD = "minimax_m3_sparse"
_OF_INDEXER = {
    "block_indexer.heads": ("index_n_heads", "sparse_num_index_heads", 4),
    "block_indexer.head_dim": ("index_head_dim", "sparse_index_dim", 128),
    "block_indexer.block": ("index_block_size", "sparse_block_size", 128),
    "block_indexer.topk": ("index_topk_blocks", "sparse_topk_blocks", 16),
    "block_indexer.local": ("index_local_blocks", "sparse_local_block", 1),
}
"""Field -> its key in transformers 5, its key in the object of published files, and its default."""


def _read_indexer(raw: Raw) -> Fields:
    """The indexer, and the layers with one. As in transformers, the object of published files wins."""
    layers = need_size(raw, "num_hidden_layers")
    older: Any = raw.get(_SPARSE) or {}
    if not isinstance(older, dict):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_SPARSE} should be an object, found {older!r:.60}"
        )
    listed = older.get("sparse_attention_freq") or [0] * layers
    words = raw.get(_TYPES) or [_WORD if each else "full_attention" for each in listed]
    require_each_layer(_TYPES, words, layers)
    others = set(words) - {_WORD, "full_attention"}
    if others:
        raise NotExpressible(f"{CONFIG_NAME}: {_TYPES} has {min(others)!r}, which is not supported")
    chosen = [layer for layer, word in enumerate(words) if word == _WORD]
    if not chosen:
        return {}
    _require_supported(older, chosen)
    found = {
        field: older.get(old, raw.get(new, usual))
        for field, (new, old, usual) in _OF_INDEXER.items()
    }
    return {**found, "layers.indexed": per_layer(chosen, layers, True, False)}


def _require_supported(older: Raw, chosen: list[int]) -> None:
    """Raise NotExpressible for an indexer that transformers' class doesn't have."""
    only = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
    for key, value in only.items():
        if older.get(key, value) != value:
            raise NotExpressible(
                f"{CONFIG_NAME}: {_SPARSE} has {key} {older[key]!r}, only {value!r} is supported"
            )
    without = older.get("sparse_disable_index_value")
    if without is not None and not all(without[layer] for layer in chosen):
        raise NotExpressible(
            f"{CONFIG_NAME}: {_SPARSE} has indexers with values (sparse_disable_index_value), which are not supported"
        )


def _write_indexer(config: ModelConfig) -> Raw:
    words = [_WORD if kind.indexed else "full_attention" for kind in config.layers]
    indexer = config.block_indexer
    values = (indexer.heads, indexer.head_dim, indexer.block, indexer.topk, indexer.local)
    sizes = {new: value for (new, _, _), value in zip(_OF_INDEXER.values(), values, strict=True)}
    return {_TYPES: words, **(sizes if indexer.heads else {})}


def _read_mlps(raw: Raw) -> Fields:
    """The layers with experts: all of them, if no key says otherwise."""
    layers = need_size(raw, "num_hidden_layers")
    listed = raw.get(_FREQUENCY) or [1] * layers
    words = raw.get(_MLPS) or ["sparse" if each else "dense" for each in listed]
    require_each_layer(_MLPS, words, layers)
    if set(words) - {"sparse", "dense"}:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_MLPS} should have 'dense' and 'sparse', found {words!r:.80}"
        )
    chosen = [layer for layer, word in enumerate(words) if word == "sparse"]
    return {"layers.mlp": per_layer(chosen, layers, "experts", "dense")}


def _write_mlps(config: ModelConfig) -> Raw:
    return {_MLPS: ["sparse" if kind.mlp == "experts" else "dense" for kind in config.layers]}


def _read_rotation(raw: Raw) -> Fields:
    """The rotating share of a head. A file of transformers 5 has it in rope_parameters, whatever rotary_dim is."""
    width = need_size(raw, "head_dim", 128)
    published = 1.0 if raw.get("rope_parameters") else need_size(raw, "rotary_dim", 64) / width
    return {"positions.rotary_percent": rotary_percent(raw, published)}


def _write_rotation(config: ModelConfig) -> Raw:
    part = config.positions.rotary_percent
    return {"rotary_dim": round(part * config.attention.head_dim), "partial_rotary_factor": part}


_BODY = decoder_keys(
    positions=524288, kv_heads=4, head_dim=128, rotation=rope(5e6), tokens=(200034, 200020, None),
    partial=Keys(("rotary_dim", "partial_rotary_factor"), _read_rotation, _write_rotation),
)  # fmt: skip
_KEYS = (
    *without_keys(_BODY, "intermediate_size"),
    size("dense_intermediate_size", "mlp.ffn", 12288),
    size("intermediate_size", "experts.ffn", 3072),
    size("shared_intermediate_size", "experts.shared_ffn", 3072),
    size("num_local_experts", "experts.count", 128),
    size("num_experts_per_tok", "experts.per_token", 4),
    number("routed_scaling_factor", "experts.scale", 2.0),
    number("swiglu_limit", "mlp.clamp", 7.0),
    choice("hidden_act", "mlp.activation", {"silu": "quick_gelu", "swigluoai": "quick_gelu"}, "silu"),
    Keys((_TYPES, _SPARSE, *(new for new, _, _ in _OF_INDEXER.values())), _read_indexer, _write_indexer),
    Keys((_MLPS, _FREQUENCY), _read_mlps, _write_mlps),
)  # fmt: skip
_FIXED = {
    **LLAMA_LIKE, **SIGMOID_ROUTER, "mlp.activation": "quick_gelu", "mlp.offset": 1.0, "norm.zero_centered": True,
    "attention.qk_norm": True,
}  # fmt: skip
_ONLY = {
    "swiglu_alpha": 1.702, "use_gemma_norm": True, "use_qk_norm": True, "qk_norm_type": "per_head", "attention_output_gate": False,
    "scoring_func": "sigmoid", "use_routing_bias": True, "norm_topk_prob": True, "n_shared_experts": 1,
}  # fmt: skip

FAMILY = Family(
    name="minimax_m3_vl_text",
    architectures=("MiniMaxM3VLForCausalLM",),
    model_type="minimax_m3_vl_text",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=_ONLY,
    ignored=ROPE_FREQUENCIES,
    left_out=MTP_LEFT_OUT,
    features=("qk_norm", "zero_centered"),
    recognized=None,
    proven="names",
    aliases={"num_experts": "num_local_experts"},
)
