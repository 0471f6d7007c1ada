"""Qwen4-Exp's language model: gated delta nets, attention with an indexer, several residual streams, embeddings of n-grams.

    hf     model.layers.{l}.{ple, attn_hyper_connection, linear_attn, self_attn, mlp_hyper_connection, mlp}
           model.hyper_connection_mixer

The mixers are those of Qwen 3.5, and the experts those of Qwen 3.5 MoE. A learned sum of the streams, with a norm of its own,
takes the place of the norms before sublayers and of the last norm. Megatron core has no such layers: these models are
converted between Hugging Face's files. Layers for multi-token prediction are left out. Source: Qwen4ExpTextConfig,
modeling_qwen4_exp.py and conversion_mapping.py of transformers 5.23.
"""

from collections.abc import Sequence
from typing import Any

from megaconv.errors import CorruptCheckpoint, UnknownFamily
from megaconv.families import Family
from megaconv.families.parts.decoder_rows import EMBEDDING, HEAD, ROPE_FREQUENCIES
from megaconv.families.parts.delta_net import (
    GATED_ATTENTION,
    HYBRID,
    HYBRID_FEATURES,
    HYBRID_ONLY,
    PROJECTIONS,
    hybrid_keys,
    linear_rows,
)
from megaconv.families.parts.experts import QWEN_EXPERTS, QWEN_SHARED
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    choice,
    flags,
    follows,
    need_size,
    size,
)
from megaconv.families.parts.layer_mixers import layer_mixers
from megaconv.families.parts.mtp import MTP_LEFT_OUT
from megaconv.families.parts.ngram_embeddings import (
    NGRAM_EMBEDDINGS,
    ngram_keys,
    with_stored_form,
)
from megaconv.families.parts.rope import partial_rotation, rotary_percent
from megaconv.families.parts.row_changes import hf_only
from megaconv.model.config import ModelConfig
from megaconv.model.fields import per_layer
from megaconv.model.table import Fused, Row

_HF = "model.layers.{l}."
_INDEXER_HF, _HYPER = _HF + "self_attn.indexer.", _HF + "{attn|mlp}_hyper_connection."
_STREAMS = "hyper_streams*hidden"
_INPUT_NORM = "layers.{l}.input_norm.weight"
_MIXERS = tuple(
    row for row in (*GATED_ATTENTION, *linear_rows(PROJECTIONS)) if row.canonical != _INPUT_NORM
)
_INDEXER = (
    Row("layers.{l}.attn.indexer.{q|k}.weight", ("block_heads*block_dim hidden", "block_dim hidden"), when="indexed",
        hf=Fused(_INDEXER_HF + "index_qk_proj.weight")),
    Row("layers.{l}.attn.indexer.{q|k}_norm.weight", ("block_dim", "block_dim"), when="indexed",
        hf=_INDEXER_HF + "{q|k}_layernorm.weight"),
)  # fmt: skip
_STREAM_WEIGHTS = (
    Row("layers.{l}.{mixer|mlp}_streams.norm.weight", (_STREAMS, _STREAMS),
        hf=_HYPER + "hc_norm.weight"),
    Row("layers.{l}.{mixer|mlp}_streams.down.weight", (f"hyper_rank {_STREAMS}",) * 2,
        hf=_HYPER + "input_mix_weight_down.weight"),
    Row("layers.{l}.{mixer|mlp}_streams.up.weight", (f"{_STREAMS} hyper_rank",) * 2,
        hf=_HYPER + "input_mix_weight_up.weight"),
    Row("layers.{l}.{mixer|mlp}_streams.inject.weight", (f"hyper_streams {_STREAMS}",) * 2,
        hf=_HYPER + "block_inject_weight.weight"),
    Row("final_streams.norm.weight", (_STREAMS,), stage="last",
        hf="model.hyper_connection_mixer.hc_norm.weight"),
    Row("final_streams.down.weight", (f"hyper_rank {_STREAMS}",), stage="last",
        hf="model.hyper_connection_mixer.input_mix_weight_down.weight"),
    Row("final_streams.up.weight", (f"{_STREAMS} hyper_rank",), stage="last",
        hf="model.hyper_connection_mixer.input_mix_weight_up.weight"),
)  # fmt: skip
_OF_LAYERS = (*NGRAM_EMBEDDINGS, *_MIXERS, *_INDEXER, *QWEN_EXPERTS, *QWEN_SHARED)
ROWS = hf_only((EMBEDDING, *_OF_LAYERS, *_STREAM_WEIGHTS, HEAD[-1]))

_INTERVAL = "full_attention_interval"
_WORDS = {"linear_attention": "linear", "full_attention": "attention", "indexed_attention": "attention"}  # fmt: skip
"""Word for a layer -> mixer. Published files have the first word for attention, and transformers' class the second."""


def _every_fourth(raw: Raw, layers: int) -> list[str]:
    interval = need_size(raw, _INTERVAL, 4)
    linear, full, _ = _WORDS
    return [linear if (layer + 1) % interval else full for layer in range(layers)]


_MIXER_KEYS = layer_mixers(_WORDS, _every_fourth, _INTERVAL)


def _mixers(raw: Raw) -> Sequence[str]:
    """The mixer of each layer."""
    found: Any = _MIXER_KEYS.read(raw)["layers.mixer"]
    return found if isinstance(found, tuple) else (found,) * need_size(raw, "num_hidden_layers")


_HEADS, _KEYS_OF_INDEXER, _DIM, _BUDGET, _BLOCK = (
    "indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio",
)  # fmt: skip


def _read_indexer(raw: Raw) -> Fields:
    """The indexer of all layers with attention. The class can't be made without its sizes."""
    mixers = _mixers(raw)
    chosen = [layer for layer, mixer in enumerate(mixers) if mixer == "attention"]
    if not chosen:
        return {}
    heads, keys, width, budget, block = (
        need_size(raw, key) for key in (_HEADS, _KEYS_OF_INDEXER, _DIM, _BUDGET, _BLOCK)
    )
    if keys != 1:
        raise UnknownFamily(
            f"{CONFIG_NAME}: {_KEYS_OF_INDEXER} {keys} is not supported in this architecture, only 1 is"
        )
    if budget % block:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_BLOCK} {block} doesn't divide {_BUDGET} {budget}"
        )
    rotating = int(need_size(raw, "head_dim", 256) * rotary_percent(raw, 1.0))
    if rotating > width:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_DIM} should be {rotating} or more, as many elements rotate; found {width}"
        )
    return {
        "layers.indexed": per_layer(chosen, len(mixers), True, False),
        "block_indexer.heads": heads,
        "block_indexer.head_dim": width,
        "block_indexer.block": block,
        "block_indexer.topk": budget // block,
        "block_indexer.pooled": True,
    }


def _write_indexer(config: ModelConfig) -> Raw:
    indexer = config.block_indexer
    if not config.has("block_indexer"):
        return {}
    sizes = {_HEADS: indexer.heads, _KEYS_OF_INDEXER: 1, _DIM: indexer.head_dim}
    return {**sizes, _BUDGET: indexer.topk * indexer.block, _BLOCK: indexer.block}


_EXPERT_WIDTH, _WIDTH = "moe_intermediate_size", 512
_OF_HYBRIDS = without_keys(
    hybrid_keys(kv_heads=2), "intermediate_size", "partial_rotary_factor", "layer_types"
)
_KEYS = (
    *_OF_HYBRIDS,
    partial_rotation(1.0),
    _MIXER_KEYS,
    Keys((_HEADS, _KEYS_OF_INDEXER, _DIM, _BUDGET, _BLOCK), _read_indexer, _write_indexer),
    choice("output_gate_type", "linear.gate", {None: "silu", "silu": "silu", "sigmoid": "sigmoid"}, None),
    ngram_keys(_mixers),
    size("hc_count", "hyper.streams", 4),
    size("hc_lowrank", "hyper.rank", 320),
    size("num_experts", "experts.count", 512),
    size("num_experts_per_tok", "experts.per_token", 10),
    size(_EXPERT_WIDTH, "experts.ffn", _WIDTH),
    follows("mlp.ffn", lambda raw: need_size(raw, _EXPERT_WIDTH, _WIDTH)),
    size("shared_expert_intermediate_size", "experts.shared_ffn", 512),
    flags("norm_topk_prob", ("experts.renormalize",), default=True),
)  # fmt: skip
_FIXED = HYBRID | {"layers.mlp": "experts", "experts.shared_gate": True}

FAMILY = Family(
    name="qwen4_exp_text",
    architectures=("Qwen4ExpForCausalLM",),
    model_type="qwen4_exp_text",
    rows=ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only=HYBRID_ONLY,
    ignored=ROPE_FREQUENCIES,
    left_out=MTP_LEFT_OUT,
    complete=with_stored_form,
    features=HYBRID_FEATURES,
    recognized=None,
    proven="names",
)
