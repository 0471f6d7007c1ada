"""Granite with attention sinks, windows on three of four layers, and layers without rope."""

from dataclasses import replace
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families.granite import FACTORS
from megaconv.families.granite import FAMILY as GRANITE
from megaconv.families.parts.decoder_keys import ATTENTION_BIASES, GATED_SILU, decoder_keys
from megaconv.families.parts.decoder_rows import SINKS
from megaconv.families.parts.keys import (
    CONFIG_NAME,
    Fields,
    Keys,
    Raw,
    flags,
    need_size,
    require_each_layer,
)
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import windows_by_layer
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each

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
_KEYS = (
    *decoder_keys(
        positions=8192, kv_heads=4, ffn=8192, epsilon=1e-5, tied=True, tokens=(100257, 100257, None)
    ),
    GATED_SILU,
    ATTENTION_BIASES,
    flags("mlp_bias", ("mlp.bias",), default=False),
    *FACTORS,
    *SINKS_AND_WINDOWS,
)

FAMILY = replace(
    GRANITE, name="granite_swa", architectures=("GraniteSWAForCausalLM",), model_type="granite_swa",
    rows=(*in_core(GRANITE.rows), SINKS), keys=_KEYS, fixed={**GRANITE.fixed, "attention.sinks": True},
)  # fmt: skip
