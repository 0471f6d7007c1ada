"""The sizes of a model that parallelism shards, and each rank's share of them."""

from collections.abc import Mapping
from typing import NamedTuple

from megaconv.errors import LayoutError
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout, divide
from megaconv.model.rank import RANKS


class Sharded(NamedTuple):
    """A size that one kind of parallelism divides."""

    size: str
    over: str
    """The kind of parallelism: `tp` (tensor), `etp` (expert tensor) or `ep` (expert)."""
    when: str | None = None
    """A feature. A tensor of this size exists only if some layer has the feature."""
    share: str | None = None
    """Name of a rank's share, if shapes also need the whole size."""


SHARDED_SIZES = (
    Sharded("heads", "tp"),
    # In compressed layers, the only key is on every rank.
    Sharded("kv_heads", "tp", when="!compressed_layers"),
    Sharded("out_groups", "tp", when="compressed"),
    Sharded("linear_key_heads", "tp", when="linear"),
    Sharded("linear_value_heads", "tp", when="linear"),
    Sharded("linear_key_heads", "tp", when="kda"),
    Sharded("linear_value_heads", "tp", when="kda"),
    Sharded("mamba_heads", "tp", when="mamba"),
    Sharded("mamba_groups", "tp", when="mamba"),
    Sharded("mamba1_width", "tp", when="mamba1"),
    Sharded("conv_channels", "tp", when="convolution"),
    Sharded("tower_heads", "tp", when="tower"),
    Sharded("tower_kv_heads", "tp", when="tower"),
    Sharded("tower_ffn", "tp", when="tower"),
    Sharded("ffn", "tp", when="dense"),
    Sharded("shared_ffn", "tp"),
    Sharded("moe_ffn", "etp", when="moe"),
    Sharded("vision_ffn", "etp", when="vision_experts"),
    Sharded("experts", "ep", when="moe", share="local_experts"),
)
"""All sharded sizes. A new size that parallelism shards is a new line here."""


def rank_sizes(
    config: ModelConfig, layout: Layout, *, shares_heads: bool = False
) -> dict[str, int]:
    """The sizes of one rank's share. Raises LayoutError if a size can't be sharded.

    shares_heads: True if several tensor-parallel ranks may share a key/value head. Megatron core allows that if there
    are more ranks than key/value heads; each rank then uses one head.
    """
    whole, parallel = config.sizes(), layout.sizes()
    sizes = dict(whole)
    for size, over, when, share in SHARDED_SIZES:
        if when is not None and not _has_layer_with(config, when):
            continue
        if size == "kv_heads" and layout.tp > whole[size]:
            sizes[size] = _shared_head(
                whole[size],
                layout.tp,
                allowed=shares_heads and not config.has("wide_qk_norm"),
                gated=config.attention.output_gate,
            )
        else:
            sizes[share or size] = divide(whole[size], parallel[over], size, RANKS[over])
    return sizes


def _has_layer_with(config: ModelConfig, feature: str) -> bool:
    return any(config.has(feature, layer) for layer in range(config.layer_count))


def own_shares(own: Mapping[str, int], layout: Layout) -> dict[str, int]:
    """One rank's share of the sizes that a layer has of its own. Raises LayoutError if a size can't be sharded."""
    over = {size: kind for size, kind, _, _ in SHARDED_SIZES}
    parallel = layout.sizes()
    shares = dict(own)
    for size, whole in own.items():
        if size in over:
            kind = over[size]
            shares[size] = divide(whole, parallel[kind], size, RANKS[kind])
    return shares


def _shared_head(kv_heads: int, tp: int, *, allowed: bool, gated: bool) -> int:
    """The key/value heads of one rank if there are more ranks than heads: always 1. Raises LayoutError if they can't be
    shared.

    Source: TransformerConfig.__post_init__ and Attention of megatron-core 0.16.1. Core 0.15.3 refuses such a model.
    """
    found = f"kv_heads = {kv_heads} can't be divided over {RANKS['tp']} = {tp}; choose a size that divides {kv_heads}"
    if not allowed:
        raise LayoutError(
            f"{found} (only Megatron core from 0.16 on lets tensor ranks share a key/value head, and not where k is normed over all heads)"
        )
    if gated:
        # Core splits q for each rank, but not the gate.
        raise LayoutError(
            f"{found} (Megatron core 0.16.1 can't share a key/value head where attention's output is gated)"
        )
    if tp % kv_heads:
        raise LayoutError(f"{found}, or a multiple of it")
    return 1
