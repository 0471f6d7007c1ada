"""Granite's factors, experts, and windows, which several families have.

hf     model.layers.{l}.{shared_mlp, block_sparse_moe}: gate and up are one tensor
"""

from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families.parts.decoder_keys import decoder_keys
from megaconv.families.parts.experts import expert_rows, shared_expert_rows
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    count,
    factor,
    need_positive,
    need_size,
    require_each_layer,
)
from megaconv.families.parts.row_changes import in_all_forms
from megaconv.families.parts.windows import windows_by_layer
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each
from megaconv.model.table import Fused, Spelling, Stacked

_HEADS = decoder_keys(positions=2048)
_MULTIPLIER = "attention_multiplier"


def _read_scale(raw: Raw) -> Fields:
    """The factor on attention scores."""
    heads = _HEADS[-1].read(raw)
    scale = need_positive(raw, _MULTIPLIER, 1.0)
    return {"attention.scale": None if scale == heads["attention.head_dim"] ** -0.5 else scale}


def _write_scale(config: ModelConfig) -> Raw:
    scale = config.attention.scale
    return {_MULTIPLIER: config.attention.head_dim**-0.5 if scale is None else scale}


FACTORS = (
    Keys((_MULTIPLIER,), _read_scale, _write_scale),
    factor("embedding_multiplier", "embedding_scale"),
    factor("residual_multiplier", "residual_scale"),
    factor("logits_scaling", "head.divisor"),
)
"""Keys of all Granite models."""

_HF = "model.layers.{l}."
_SHARED = _HF + "shared_mlp."
SHARED_NAMES: dict[str, Spelling] = {
    "layers.{l}.mlp.{gate|up}.weight": Fused(_SHARED + "input_linear.weight"),
    "layers.{l}.mlp.down.weight": _SHARED + "output_linear.weight",
    "layers.{l}.mlp.shared.{gate|up}.weight": Fused(_SHARED + "input_linear.weight"),
    "layers.{l}.mlp.shared.down.weight": _SHARED + "output_linear.weight",
}
_EXPERT_NAMES: dict[str, Spelling] = {
    "layers.{l}.mlp.router.weight": _HF + "block_sparse_moe.router.layer.weight",
    "layers.{l}.mlp.experts.{e}.{gate|up}.weight": Stacked(_HF + "block_sparse_moe.input_linear.weight"),
    "layers.{l}.mlp.experts.{e}.down.weight": Stacked(_HF + "block_sparse_moe.output_linear.weight"),
}  # fmt: skip


EXPERTS = in_all_forms(
    (*expert_rows("", "{|}", ""), *shared_expert_rows("{|}", "")), SHARED_NAMES | _EXPERT_NAMES
)
"""Router, experts and the shared expert."""

SHARED_WIDTH = count("shared_intermediate_size", "experts.shared_ffn")
"""The width of the shared expert; 0 if there is none."""

_THETAS = "layer_rope_theta"


def _read_thetas(raw: Raw) -> Fields:
    """The base of each layer; 0 in a layer without rope. The bases of all other layers have to be equal."""
    thetas: Any = raw.get(_THETAS)
    if thetas is None:
        return {}
    layers = need_size(raw, "num_hidden_layers")
    require_each_layer(_THETAS, thetas, layers)
    used = {float(theta) for theta in thetas if theta}
    if len(used) > 1:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_THETAS} has the bases {sorted(used)}; layers with different bases are not supported"
        )
    rotates = {"layers.rotates": one_or_each(tuple(bool(theta) for theta in thetas))}
    return rotates | ({"positions.theta": used.pop()} if used else {})


def _write_thetas(config: ModelConfig) -> Raw:
    theta = config.positions.theta
    return {_THETAS: [theta if kind.rotates else 0 for kind in config.layers]}


SINKS_AND_WINDOWS = (
    windows_by_layer(128, full_every=4, full_first=True),
    Keys((_THETAS,), _read_thetas, _write_thetas),
)
"""Keys of all Granite models with windows. The last of them has to follow the key of rope."""
