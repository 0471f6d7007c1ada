"""DeepSeek V4's attention: one key for all heads, which is the value too, and entries that compress earlier tokens.

    hf           layers.{l}.{attn_norm, attn.{wq_a, q_norm, wq_b, wkv, kv_norm, attn_sink, wo_a, wo_b, compressor, indexer}}
    hf_stacked   model.layers.{l}.{input_layernorm, self_attn.{q_a_proj, q_a_norm, q_b_proj, kv_proj, ..., compressor}}

A layer has no entries, all entries, or those that an indexer selects. Each entry is a sum of several tokens, with weights
from a gate and a position. Ropes are in compressed_ropes.py.
Source: DeepseekV4Config and modeling_deepseek_v4.py of transformers 5.23.
"""

from typing import Any

from megaconv.errors import CorruptCheckpoint, UnknownFamily
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    need_size,
    require_each_layer,
    size,
)
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.table import Row

_HF, _CLASS = "layers.{l}.attn.", "model.layers.{l}.self_attn."
_COMPRESSOR = {"hf": _HF + "compressor.", "hf_stacked": _CLASS + "compressor."}
_INDEXER = {"hf": _HF + "indexer.compressor.", "hf_stacked": _CLASS + "compressor.indexer."}


def _compressor(
    name: str, places: dict[str, str], width: str, tokens: str, norm: str, when: str
) -> tuple[Row, ...]:
    """The rows of what makes entries. width: of a token's part. tokens: of an entry. norm: width of an entry."""
    published, of_class = places["hf"], places["hf_stacked"]
    return (
        Row(name + "{kv|gate}.weight", (f"{width} hidden", f"{width} hidden"), when=when,
            hf=published + "{wkv|wgate}.weight",
            hf_stacked=of_class + "{kv_proj|gate_proj}.weight"),
        Row(name + "position", (f"{tokens} {width}",), when=when,
            hf=published + "ape",
            hf_stacked=of_class + "position_bias"),
        Row(name + "norm.weight", (norm,), when=when,
            hf=published + "norm.weight",
            hf_stacked=of_class + "kv_norm.weight"),
    )  # fmt: skip


_SELECTED = "selected_entries"
COMPRESSED_ATTENTION = (
    Row("layers.{l}.input_norm.weight", ("hidden",), when="compressed",
        hf="layers.{l}.attn_norm.weight",
        hf_stacked="model.layers.{l}.input_layernorm.weight"),
    Row("layers.{l}.attn.q_down.weight", ("compressed_q_rank hidden",), when="compressed",
        hf=_HF + "wq_a.weight",
        hf_stacked=_CLASS + "q_a_proj.weight"),
    Row("layers.{l}.attn.q_latent_norm.weight", ("compressed_q_rank",), when="compressed",
        hf=_HF + "q_norm.weight",
        hf_stacked=_CLASS + "q_a_norm.weight"),
    Row("layers.{l}.attn.q_up.weight", ("heads*head_dim compressed_q_rank",), tp=0, when="compressed",
        hf=_HF + "wq_b.weight",
        hf_stacked=_CLASS + "q_b_proj.weight"),
    Row("layers.{l}.attn.kv.weight", ("head_dim hidden",), when="compressed",
        hf=_HF + "wkv.weight",
        hf_stacked=_CLASS + "kv_proj.weight"),
    Row("layers.{l}.attn.kv_norm.weight", ("head_dim",), when="compressed",
        hf=_HF + "kv_norm.weight",
        hf_stacked=_CLASS + "kv_norm.weight"),
    Row("layers.{l}.attn.sinks", ("heads",), tp=0, when="compressed",
        hf=_HF + "attn_sink",
        hf_stacked=_CLASS + "sinks"),
    Row("layers.{l}.attn.o_down.weight", ("out_groups*out_rank out_group_width",), tp=0, when="compressed",
        hf=_HF + "wo_a.weight",
        hf_stacked=_CLASS + "o_a_proj.weight"),
    Row("layers.{l}.attn.o_up.weight", ("hidden out_groups*out_rank",), tp=1, when="compressed",
        hf=_HF + "wo_b.weight",
        hf_stacked=_CLASS + "o_b_proj.weight"),
    *_compressor("layers.{l}.attn.compressor.", _COMPRESSOR, "2*head_dim", "short_entry", "head_dim", _SELECTED),
    *_compressor("layers.{l}.attn.long_compressor.", _COMPRESSOR, "head_dim", "long_entry", "head_dim", "all_entries"),
    *_compressor("layers.{l}.attn.indexer.", _INDEXER, "2*entry_dim", "short_entry", "entry_dim", _SELECTED),
    Row("layers.{l}.attn.indexer.q_up.weight", ("entry_heads*entry_dim compressed_q_rank",), when=_SELECTED,
        hf=_HF + "indexer.wq_b.weight",
        hf_stacked=_CLASS + "compressor.indexer.q_b_proj.weight"),
    Row("layers.{l}.attn.indexer.weights.weight", ("entry_heads hidden",), when=_SELECTED,
        hf=_HF + "indexer.weights_proj.weight",
        hf_stacked=_CLASS + "compressor.indexer.scorer.weights_proj.weight"),
)  # fmt: skip
"""The rows of attention, with the norm before it."""


def attention_keys(
    *, heads: int, head_dim: int, rank: int, groups: int, group_rank: int, window: int
) -> tuple[Keys, ...]:
    """The sizes of attention. The numbers are the defaults for missing keys."""
    of_window = Keys(
        ("sliding_window",),
        lambda raw: {"layers.window": need_size(raw, "sliding_window", window)},
        lambda config: {"sliding_window": config.window or window},
    )
    return (
        size("num_attention_heads", "attention.heads", heads),
        size("head_dim", "attention.head_dim", head_dim),
        size("q_lora_rank", "compressed.q_rank", rank),
        size("o_groups", "compressed.out_groups", groups),
        size("o_lora_rank", "compressed.out_rank", group_rank),
        of_window,
    )


_TYPES, _RATIOS, _RATES = "layer_types", "compress_ratios", "compress_rates"
_SHORT, _LONG = "compressed_sparse_attention", "heavily_compressed_attention"
_ENTRIES = {"sliding_attention": "none", _SHORT: "selected", _LONG: "all"}
_WORDS = {entries: word for word, entries in _ENTRIES.items()}
_OF_RATIO = {0: "none", 4: "selected", 128: "all"}
_USUAL = {"compressed.short": (_SHORT, "compress_rate_csa", 4), "compressed.long": (_LONG, "compress_rate_hca", 128)}  # fmt: skip
"""Field -> its key in compress_rates, its older key, and its default."""


def entry_keys(*, heads: int, head_dim: int, topk: int) -> tuple[Keys, ...]:
    """The entries of each layer, and the indexer. The numbers are the defaults of the indexer's keys."""
    older = (key for _, key, _ in _USUAL.values())
    return (
        Keys((_TYPES, _RATIOS, _RATES, *older), _read_entries, _write_entries),
        size("index_n_heads", "compressed.index_heads", heads),
        size("index_head_dim", "compressed.index_dim", head_dim),
        size("index_topk", "compressed.topk", topk),
    )


def _read_entries(raw: Raw) -> Fields:
    """The entries of each layer: transformers' words, or the published numbers, which may go on with further layers."""
    layers = need_size(raw, "num_hidden_layers")
    words = raw.get(_TYPES)
    key, listed, known = (
        (_TYPES, words, _ENTRIES) if words else (_RATIOS, raw.get(_RATIOS), _OF_RATIO)
    )
    if listed is None:
        found = _usual_entries(layers)
    else:
        require_each_layer(key, listed[:layers], layers)
        for word in listed[:layers]:
            if word not in known:
                expected = ", ".join(map(str, known))
                raise UnknownFamily(
                    f"{CONFIG_NAME}: {key} has {word!r}; this architecture supports {expected}"
                )
        found = tuple(known[word] for word in listed[:layers])
    return {"layers.entries": one_or_each(found), **_read_rates(raw)}


def _usual_entries(layers: int) -> tuple[str, ...]:
    """The class's default: all entries in the first two layers, then all and selected ones in turn."""
    return tuple("selected" if layer > 2 and layer % 2 else "all" for layer in range(layers))


def _read_rates(raw: Raw) -> Fields:
    rates = raw.get(_RATES) or {}
    if not isinstance(rates, dict):
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {_RATES} should be an object, found {rates!r:.60}")
    found = {}
    for field, (key, older, usual) in _USUAL.items():
        found[field] = need_size(raw, older, need_size(rates, key, usual))
    return found


def _write_entries(config: ModelConfig) -> Raw:
    """transformers' keys, and the published one if the numbers of tokens are those of the published models."""
    compressed = config.compressed
    rates = {_SHORT: compressed.short, _LONG: compressed.long}
    written: dict[str, Any] = {
        _TYPES: [_WORDS[kind.entries] for kind in config.layers],
        _RATES: rates,
    }
    if tuple(rates.values()) == (4, 128):
        ratios = {entries: ratio for ratio, entries in _OF_RATIO.items()}
        written[_RATIOS] = [ratios[kind.entries] for kind in config.layers]
    return written
