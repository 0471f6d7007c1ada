"""The language model of GLM-5.3: Kimi delta attention, sparse latent attention without positions, and residual streams.

    hf            model.layers.{l}.{hc_attn_fn, input_layernorm, self_attn, hc_ffn_fn, post_attention_layernorm, mlp}
    hf_stacked    the same in transformers' class, with attn_hc.fn, self_attn.forget_gate, self_attn.conv1d and stacked experts

The first form is that of published files, which transformers writes too. It has a class of the language model without a
head. An indexer ranks groups of neighbouring keys, each by a weighted sum of its keys. Megatron core has no such layers:
these models are converted between Hugging Face's files. Layers for multi-token prediction are left out. Source:
Glm5NextTextConfig, modeling_glm5_next.py and conversion_mapping.py of transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import Family
from megaconv.families.kimi_linear import CLASS_NAMES, KDA
from megaconv.families.parts.decoder_keys import LLAMA_LIKE, SILU, body_keys
from megaconv.families.parts.decoder_rows import HEAD
from megaconv.families.parts.deepseek_experts import (
    DEEPSEEK_MLPS,
    SIGMOID_ROUTER,
    mlp_layer_types,
    routed_experts,
    shared_experts,
    sigmoid_routing,
)
from megaconv.families.parts.headless import EMBEDDING_ALONE, tied_without
from megaconv.families.parts.hyper_connections import HYPER_KEYS, hyper_connections
from megaconv.families.parts.indexer import sparse_attention
from megaconv.families.parts.indexer_types import types_by_pattern
from megaconv.families.parts.kda_config import KDA_CONFIG
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    flags,
    need_number,
    need_size,
    number,
    only_in_files,
    size,
)
from megaconv.families.parts.latent_attention import require_own_groups
from megaconv.families.parts.layer_mixers import layer_mixers
from megaconv.families.parts.mamba_and_mlp import rows_of
from megaconv.families.parts.mtp import MTP_LEFT_OUT, layers_after_the_last
from megaconv.families.parts.row_changes import hf_only, respelled
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.table import Row

_LAYER = "model.layers.{l}."
_ATTENTION = _LAYER + "self_attn."
_GATE, _INDEXER = _ATTENTION + "forget_gate.", _ATTENTION + "indexer."
_DECAYS = "layers.{l}.kda.A_log"
_KDA = (
    *respelled(tuple(row for row in KDA if row.canonical != _DECAYS), CLASS_NAMES),
    Row(_DECAYS, ("linear_value_heads",), tp=0, when="kda",
        hf=_ATTENTION + "A_log",
        hf_stacked=_GATE + "A_log"),
)  # fmt: skip
_POOLS = Row(
    "layers.{l}.attn.indexer.pool.{position|gate}", ("index_pool index_dim", "index_dim hidden"), when="index_pools",
    hf=_INDEXER + "index_kpool_compress_{ape|gate}",
)  # fmt: skip
_SPARSE = (*sparse_attention(halves=False), _POOLS)
_INDEXED = tuple(row for row in _SPARSE if ".indexer." in row.canonical)
_LATENT = tuple(row for row in _SPARSE if ".indexer." not in row.canonical)
_STREAMS = hyper_connections(
    (_LAYER + "hc_attn_", _LAYER + "hc_ffn_", ""),
    scales=3,
    of_class=(_LAYER + "attn_hc.", _LAYER + "ffn_hc.", ""),
)
_OF_LAYERS = tuple(row for row in _STREAMS if row.stage == "layer")
_MIXERS = (*_KDA, *rows_of("attention", _LATENT), *rows_of("attention own_index", _INDEXED))
ROWS = hf_only((EMBEDDING_ALONE, *_MIXERS, *DEEPSEEK_MLPS, *_OF_LAYERS, *HEAD))

_WORDS = {
    "linear_attention": "kda",
    "indexed_attention": "attention",
    "full_attention": "attention",
    "deepseek_sparse_attention": "attention",
}
_SIZES = {
    "linear_num_heads": ("num_heads", 64),
    "linear_head_dim": ("head_dim", 128),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
}
"""Key -> (key of the same size in linear_attn_config, which wins, and the default)."""
_BOUND, _USUAL_BOUND = "linear_lower_bound", -5.0


def _words(raw: Raw, layers: int) -> list[str]:
    """The words of a file without layer_types: every fourth layer has latent attention."""
    return ["linear_attention" if (layer + 1) % 4 else "indexed_attention" for layer in range(layers)]  # fmt: skip


def _linear_config(raw: Raw) -> Mapping[str, Any]:
    stated = raw.get(KDA_CONFIG) or {}
    if not isinstance(stated, dict):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {KDA_CONFIG} should be an object, found {stated!r:.60}"
        )
    return stated


def _read_linear(raw: Raw) -> Fields:
    stated = _linear_config(raw)
    heads, width, positions = (
        need_size(stated, inner, need_size(raw, key, usual))
        for key, (inner, usual) in _SIZES.items()
    )
    bound = stated.get("gate_lower_bound", raw.get(_BOUND, _USUAL_BOUND))
    if bound is None and stated and stated.get("safe_gate", True):
        bound = _USUAL_BOUND
    return {
        "linear.key_heads": heads,
        "linear.value_heads": heads,
        "linear.key_dim": width,
        "linear.value_dim": width,
        "linear.conv": positions,
        "linear.forget_bound": None if bound is None else need_number({_BOUND: bound}, _BOUND, 0.0),
    }


def _write_linear(config: ModelConfig) -> Raw:
    linear = config.linear
    sizes = (linear.value_heads, linear.value_dim, linear.conv)
    return {**dict(zip(_SIZES, sizes, strict=True)), _BOUND: linear.forget_bound}


_WIDTHS = {
    "kv_lora_rank": ("latent.kv_rank", 512),
    "q_lora_rank": ("latent.q_rank", 1536),
    "v_head_dim": ("latent.v_dim", 256),
    "qk_nope_head_dim": ("attention.head_dim", 256),
}
_HEADS, _GROUPS = "num_attention_heads", "num_key_value_heads"


def _read_heads(raw: Raw) -> Fields:
    heads = need_size(raw, _HEADS)
    if raw.get(_GROUPS, 64) is not None:
        require_own_groups(raw.get(_GROUPS, 64), heads)
    widths = {field: need_size(raw, key, usual) for key, (field, usual) in _WIDTHS.items()}
    return {"attention.heads": heads, "attention.kv_heads": heads, **widths}


def _write_heads(config: ModelConfig) -> Raw:
    attention, latent = config.attention, config.latent
    return {
        _HEADS: attention.heads,
        _GROUPS: attention.kv_heads,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "v_head_dim": latent.v_dim,
        "qk_nope_head_dim": attention.head_dim,
    }


_TYPES = types_by_pattern()


def _read_types(raw: Raw) -> Fields:
    """The layers that share an indexer's choice. Raises NotExpressible unless the layer right before has the indexer, as
    transformers does."""
    layers = need_size(raw, "num_hidden_layers")
    words = raw.get("layer_types") or _words(raw, layers)
    attends = [_WORDS.get(word) == "attention" for word in words]
    shared = _TYPES.read(raw)["layers.shares_index"]
    each = shared if isinstance(shared, tuple) else (shared,) * layers
    for layer in range(1, min(layers, len(attends))):
        gives = attends[layer - 1] and not each[layer - 1]
        if each[layer] and attends[layer] and not gives:
            raise NotExpressible(
                f"{CONFIG_NAME}: indexer_types has 'shared' in layer {layer}, and the layer before has no indexer"
            )
    kept = (is_shared and attend for is_shared, attend in zip(each, attends, strict=False))
    return {"layers.shares_index": one_or_each(tuple(kept))}


_POOL, _TOPK = "index_kpool", "index_topk"


def _read_pools(raw: Raw) -> Fields:
    pool, topk = need_size(raw, _POOL, 16), need_size(raw, _TOPK, 2048)
    if topk % pool:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_TOPK} {topk} is not a multiple of {_POOL} {pool}"
        )
    return {"indexer.pool": pool, "indexer.topk": topk}


def _write_pools(config: ModelConfig) -> Raw:
    return {_POOL: config.indexer.pool, _TOPK: config.indexer.topk}


_OF_PUBLISHED: Raw = {
    "index_kpool_compress": True, "mhc": True, "mla_use_nope": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
"""Keys that published files have and transformers' class doesn't read -> the values that it computes."""


_BODY = body_keys(positions=1048576, ffn=12288, epsilon=1e-5, tokens=(None, None, 154820))
_KEYS = (
    *without_keys(_BODY, "rope_theta", "partial_rotary_factor"),
    Keys((_HEADS, _GROUPS, *_WIDTHS, "head_dim", "qk_head_dim"), _read_heads, _write_heads),
    layer_mixers(_WORDS, _words),
    Keys((*_SIZES, _BOUND, KDA_CONFIG), _read_linear, _write_linear),
    *routed_experts(count=288, width=2048),
    shared_experts(count=1, width=2048),
    mlp_layer_types(dense=3),
    *sigmoid_routing(scale=2.5, groups=1, group_topk=1),
    size("index_n_heads", "indexer.heads", 32),
    size("index_head_dim", "indexer.head_dim", 128),
    Keys((_POOL, _TOPK), _read_pools, _write_pools),
    flags("index_kpool_always_select_tail", ("indexer.keeps_tail",), default=True),
    Keys(_TYPES.names, _read_types, _TYPES.write),
    *HYPER_KEYS,
    number("swiglu_limit", "mlp.clamp", 10.0),
    only_in_files(_OF_PUBLISHED),
)
_FIXED = {
    **LLAMA_LIKE,
    **SIGMOID_ROUTER,
    "positions.kind": "none",
    "hyper.learned_head": False,
}


FAMILY = Family(
    name="glm5_next_text",
    architectures=("Glm5NextTextModel",),
    model_type="glm5_next_text",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={**SILU, "attention_bias": False, "qk_rope_head_dim": 0},
    aliases={"num_local_experts": "n_routed_experts"},
    left_out=MTP_LEFT_OUT,
    unused=layers_after_the_last,
    prefix="model.",
    complete=tied_without("lm_head.weight"),
    features=("mla", "q_latent", "indexer"),
    recognized=None,
    proven="names",
)
