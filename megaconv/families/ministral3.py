"""Ministral 3: Mistral with a factor on q that grows with the position.

Megatron core has no such factor. It is 1 up to `original_max_position_embeddings` tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaconv.families.mistral import FAMILY as MISTRAL
from megaconv.families.parts.decoder_keys import decoder_keys
from megaconv.families.parts.keys import Fields, Keys, Raw, need_number
from megaconv.families.parts.rope import rope
from megaconv.families.parts.row_changes import in_core
from megaconv.families.parts.windows import window
from megaconv.model.config import ModelConfig

_LENGTH = "original_max_position_embeddings"
_BETA, _USUAL_BETA = "llama_4_scaling_beta", 0.1
_SCALING = {
    "rope_type": "yarn",
    "factor": 16.0,
    _LENGTH: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: _USUAL_BETA,
}
_ROPE = rope(1e6, _SCALING)


def _temperature(scale: float, scaling: Mapping[str, Any] | None) -> Fields:
    """The fields of the factor. A model without a length has no factor."""
    length = (scaling or {}).get(_LENGTH)
    if not scale or type(length) is not int:
        return {"temperature.scale": 0.0}
    return {
        "temperature.scale": scale,
        "temperature.interval": length,
        "temperature.everywhere": True,
    }


def _read_rope(raw: Raw) -> Fields:
    found = dict(_ROPE.read(raw))
    scaling = found["positions.scaling"]
    if scaling is None:
        return found
    plain = {
        name: value
        for name, value in scaling.items()
        if name not in (_BETA, "max_position_embeddings")
    }
    beta = need_number(scaling, _BETA, 0.0)
    return {**found, "positions.scaling": plain, **_temperature(beta, plain)}


def _write_rope(config: ModelConfig) -> Raw:
    written = dict(_ROPE.write(config))
    if config.temperature.scale:
        written["rope_scaling"] = {**written["rope_scaling"], _BETA: config.temperature.scale}
    return written


_KEYS = (
    *decoder_keys(
        positions=262144, kv_heads=8, head_dim=128, epsilon=1e-5, rotation=Keys(_ROPE.names, _read_rope, _write_rope),
        tokens=(1, 2, 11),
    ),
    window(None),
)  # fmt: skip


def _notices(config: ModelConfig) -> tuple[str, ...]:
    interval = config.temperature.interval
    if not config.temperature.scale or config.max_positions <= interval:
        return ()
    return (
        f"from {interval} tokens on the model scales queries by their position ({_BETA}), which Megatron core doesn't do: it computes "
        f"the same up to {interval} tokens, of {config.max_positions}",
    )


FAMILY = replace(
    MISTRAL, name="ministral3", architectures=("Ministral3ForCausalLM",), model_type="ministral3", rows=in_core(MISTRAL.rows),
    keys=_KEYS, recognized=None, notices=_notices,
    assumed=lambda fields: _temperature(_USUAL_BETA, fields.get("positions.scaling")),
)  # fmt: skip
