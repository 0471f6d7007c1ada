"""The configuration of a model with fewer channels or heads."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megaconv.engine.kept_places import places_of
from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families import family
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import changed
from megaconv.model.meaning import lost_fields, require_kept
from megaconv.options.kept_channels import HIDDEN

_ROOTS = ("embedding_scale", "head.divisor")
"""Fields that are the root of the hidden size in some families."""


def narrowed_config(
    config: ModelConfig, axes: Mapping[str, Sequence[str]], sizes: Mapping[str, int], asked: str
) -> ModelConfig:
    """The configuration of the model with other sizes.

    axes: of all tensors. sizes: by field. asked: the option, for messages. Raises NotExpressible if no such model is possible.
    """
    if "attention.heads" in sizes:
        _require_heads_alike(config, sizes, asked)
    has_own_widths = any(kind.ffn is not None for kind in config.layers)
    has_encoder_width = any("encoder_ffn" in of_tensor for of_tensor in axes.values())
    if "mlp.ffn" in sizes and (has_own_widths or has_encoder_width):
        raise NotExpressible(
            f"{asked}: layers of this {config.family} have MLPs of other widths; keep the channels of MLPs"
        )
    try:
        narrowed = changed(config, {**sizes, **_following(config, axes, sizes)})
        return replace(narrowed, hf=_own_config(narrowed))
    except (CorruptCheckpoint, NotExpressible) as error:
        raise NotExpressible(f"{asked}: no {config.family} has these sizes: {error}") from error


def _require_heads_alike(config: ModelConfig, sizes: Mapping[str, int], asked: str) -> None:
    """Raise NotExpressible if heads of some layers differ from others, or serve other layers too."""
    own = [size for kind in config.layers for size in (kind.heads, kind.kv_heads, kind.head_dim)]
    if any(own):
        raise NotExpressible(
            f"{asked}: layers of this {config.family} have attention of other sizes; keep all its heads"
        )
    if config.attention.differential:
        raise NotExpressible(
            f"{asked}: heads of a {config.family} work in pairs that are no groups; keep all its heads"
        )
    reason = _reason_for_all_groups(config)
    if reason and sizes["attention.kv_heads"] < config.attention.kv_heads:
        raise NotExpressible(
            f"{asked}: layers of this {config.family} {reason}; keep heads of each group"
        )


def _reason_for_all_groups(config: ModelConfig) -> str | None:
    """The reason why no group of heads may leave attention; None if any may."""
    if any(kind.shares_kv for kind in config.layers):
        return "share keys and values"
    if any(kind.indexed for kind in config.layers) and not config.block_indexer.pooled:
        return "select the keys of each group"
    return "choose keys by the values of all groups" if config.attention.kept_keys else None


def _following(
    config: ModelConfig, axes: Mapping[str, Sequence[str]], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Values that follow from the new sizes."""
    found: dict[str, Any] = {}
    fields = set(places_of(axes).values())
    if "mlp.ffn" not in fields and "experts.ffn" in sizes and config.mlp.ffn == config.experts.ffn:
        found["mlp.ffn"] = sizes["experts.ffn"]  # a width that no tensor has
    if "attention.heads" not in fields and "mamba.heads" in sizes:
        # Models of Mamba alone count their heads as those of attention too.
        found |= dict.fromkeys(("attention.heads", "attention.kv_heads"), sizes["mamba.heads"])
    for field in _ROOTS if HIDDEN in sizes else ():
        value = value_of(config, field)
        if value == math.sqrt(config.hidden) and not _is_stated(config, field):
            found[field] = math.sqrt(sizes[HIDDEN])
    return found


def _is_stated(config: ModelConfig, field: str) -> bool:
    """True if a config.json of the family states a field, False if its class computes the field with the hidden size."""
    another = changed(config, {field: value_of(config, field) + 1})
    try:
        family(config.family).write_hf(another)
    except NotExpressible:
        return False
    return True


def _own_config(made: ModelConfig) -> Mapping[str, Any] | None:
    """The model's own config.json for the new sizes; None if it isn't known. Raises NotExpressible if it can't describe them."""
    if made.hf is None:
        return None
    table = family(made.family)
    own: dict[str, Any] = json.loads(table.config_json(made))
    if lost_fields(made, _read(own, made)):
        # A key that a config.json leaves out may follow from a size that changes, such as head_dim.
        stated = {key: value for key, value in own.items() if value is not None}
        own = {**own, **table.write_hf(made), **stated}
    require_kept(made, _read(own, made), "its config.json")
    return own


def _read(raw: Mapping[str, Any], made: ModelConfig) -> ModelConfig:
    """The model of a config.json, which may list MTP layers that no file holds."""
    found = family(made.family).read_hf(raw)
    return replace(found, mtp_layers=made.mtp_layers, dtype=made.dtype)
