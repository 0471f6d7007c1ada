"""Last layers that attend with the keys and values of earlier ones, as in Gemma 3n and Gemma 4: their key and rows.

    hf     model.layers.{l}.self_attn.{k_proj, v_proj, k_norm} only in layers before them
    core   decoder.layers.{l}.self_attention.linear_qkv: q, k and v; q and k where keys are the values; or q alone

A layer takes the keys and values of the last layer before them with a window, or without one if it has none.
"""

from collections.abc import Mapping
from dataclasses import replace

from megaconv.errors import CorruptCheckpoint
from megaconv.families.parts.keys import CONFIG_NAME, Raw, need_size
from megaconv.model.config import ModelConfig
from megaconv.model.patterns import expand
from megaconv.model.table import Fused, Row

SHARED_LAYERS = "num_kv_shared_layers"

_HF = "model.layers.{l}.self_attn."
_CORE = "decoder.layers.{l}.self_attention."
_QKV = "layers.{l}.attn.{q|k|v}.weight"
_NORMS = "layers.{l}.attn.{q|k}_norm.weight"
_HELD = (("{q|k|v}", "own_values"), ("{q|k}", "own_kv !own_values"), ("q", "!own_kv"))
"""The projections that a layer has -> the feature of such layers."""
_KEYS_AND_VALUES = r"model\.layers\.(?:{layers})\.self_attn\.(?:[kv]_proj|[kv]_norm)\.weight"


def with_shared_kv(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows with k, v and the norm of k only in layers that have their own."""
    return tuple(made for row in rows for made in _apart(row))


def _apart(row: Row) -> tuple[Row, ...]:
    if row.canonical == _QKV:
        return tuple(_projections(row, words, when) for words, when in _HELD)
    if row.canonical == _NORMS:
        return tuple(
            replace(row, canonical=f"layers.{{l}}.attn.{one}_norm.weight", shapes=("head_dim",), when=when, names={})
            .renamed(hf=f"{_HF}{one}_norm.weight", core=f"{_CORE}{one}_layernorm.weight")
            for one, when in (("q", "qk_norm"), ("k", "qk_norm own_kv"))
        )  # fmt: skip
    return (row,)


def _projections(row: Row, words: str, when: str) -> Row:
    """The row of q, k and v, with the projections of these words alone."""
    held = len(expand(words))
    return Row(
        f"layers.{{l}}.attn.{words}.weight", row.shapes[:held], tp=0, when=when,
        hf=f"{_HF}{words}_proj.weight",
        core=Fused(f"{_CORE}linear_qkv.weight", groups="kv_heads"),
    )  # fmt: skip


def sharing_layers(raw: Raw, windowed: tuple[int, ...], default: int) -> range:
    """The layers that share keys and values. windowed: the layers with a window.

    Raises CorruptCheckpoint if a layer has no earlier one to share with.
    """
    layers = need_size(raw, "num_hidden_layers")
    shared = raw.get(SHARED_LAYERS, default)
    if type(shared) is not int or not 0 <= shared < layers:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {SHARED_LAYERS} should be a number below {layers}, found {shared!r}"
        )
    found = range(layers - shared, layers)
    earlier = {layer in windowed for layer in range(found.start)}
    if any((layer in windowed) not in earlier for layer in found):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {SHARED_LAYERS} is {shared}, and no earlier layer has a window where a later one has; "
            "both kinds of layers need one to share with"
        )
    return found


def count_sharing(config: ModelConfig) -> int:
    """The number of layers that share keys and values."""
    return sum(kind.shares_kv for kind in config.layers)


def unused_keys_and_values(config: ModelConfig) -> Mapping[str, str]:
    """The tensors of layers that share keys and values: published files hold them, and nothing computes with them."""
    sharing = [str(layer) for layer, kind in enumerate(config.layers) if kind.shares_kv]
    if not sharing:
        return {}
    pattern = _KEYS_AND_VALUES.replace("{layers}", "|".join(sharing))
    return {pattern: "keys and values of layers that share those of earlier layers"}
