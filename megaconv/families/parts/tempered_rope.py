"""Rope with a factor on q that grows with the position, as Mistral's models since Ministral 3 have it.

    "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 8192, "llama_4_scaling_beta": 0.1, ...}

Megatron core has no such factor. It is 1 up to `original_max_position_embeddings` tokens.
"""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_number
from megaconv.families.parts.rope import rope, rope_object
from megaconv.model.config import ModelConfig

_LENGTH = "original_max_position_embeddings"
_BETA, _USUAL_BETA = "llama_4_scaling_beta", 0.1


def mistral_yarn(factor: float, length: int) -> dict[str, Any]:
    """The rope scaling of transformers' classes for a config.json without one.

    length: the number of positions that the model was trained with.
    """
    return {
        "rope_type": "yarn",
        "factor": factor,
        _LENGTH: length,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        _BETA: _USUAL_BETA,
    }


def _temperature(scale: float, scaling: Mapping[str, Any] | None) -> Fields:
    """The fields of the factor. A model without a length has no factor."""
    length = (scaling or {}).get(_LENGTH)
    if not scale or length is None:
        return {"temperature.scale": 0.0}
    if length != int(length):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_LENGTH} should be a number of tokens, found {length!r}"
        )
    return {
        "temperature.scale": scale,
        "temperature.interval": int(length),
        "temperature.everywhere": True,
    }


def _require_no_factor(raw: Raw) -> None:
    """Raise NotExpressible if a config.json without rope scaling has the factor."""
    beta = rope_object(raw).get(_BETA)
    if beta:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_BETA} {beta!r} is not supported without rope scaling"
        )


def usual_temperature(fields: Mapping[str, Any]) -> Fields:
    """The fields of the factor for a model of which only Megatron's arguments are known."""
    return _temperature(_USUAL_BETA, fields.get("positions.scaling"))


def tempered_rope(theta: float, scaling: Mapping[str, Any], *, stated_theta: float) -> Keys:
    """Base and scaling of rope, and the factor. theta, scaling, stated_theta: as in `rope`."""
    plain_rope = rope(theta, scaling, stated_theta=stated_theta)

    def read(raw: Raw) -> Fields:
        found = dict(plain_rope.read(raw))
        stated = found["positions.scaling"]
        if stated is None:
            _require_no_factor(raw)
            return found
        plain = {
            name: value
            for name, value in stated.items()
            if name not in (_BETA, "max_position_embeddings")
        }
        beta = need_number(stated, _BETA, 0.0)
        return {**found, "positions.scaling": plain, **_temperature(beta, plain)}

    def write(config: ModelConfig) -> Raw:
        written = dict(plain_rope.write(config))
        # transformers computes the factor in every model, also if it is 1, and needs both of its keys.
        length = {} if config.positions.scaling else {_LENGTH: config.max_positions}
        beta = {_BETA: config.temperature.scale}
        return {**written, "rope_scaling": {**written["rope_scaling"], **length, **beta}}

    return Keys(plain_rope.names, read, write)


def no_temperature_in_core(config: ModelConfig) -> tuple[str, ...]:
    """The notice for a model with more positions than those at which the factor is 1."""
    interval = config.temperature.interval
    if not config.temperature.scale or config.max_positions <= interval:
        return ()
    return (
        f"from {interval} tokens on the model scales queries by their position ({_BETA}), which Megatron core doesn't do: it computes "
        f"the same up to {interval} tokens, of {config.max_positions}",
    )
