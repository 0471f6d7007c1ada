"""A rope or none for each kind of layers, with and without a window, in one key.

    "rope_parameters": {"full_attention": null, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}

A kind of layers whose rope is null has no positions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw
from megaconv.families.parts.layer_ropes import (
    layer_ropes,
    length_of,
    require_bases,
    require_no_scaling_beside,
)
from megaconv.families.parts.windows import layer_types
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each

_ROPE, _FULL, _WINDOWED = "rope_parameters", "full_attention", "sliding_attention"
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def ropes_or_none(theta: float, windows: Keys, usual: Raw | None = None) -> Keys:
    """The keys of windows, and of the ropes of both kinds of layers.

    theta: the base of a model without a rope. windows: the keys that give layers.window. usual: rope_parameters if the
    key is missing; None if it is required.
    """
    ropes = layer_ropes(theta, theta)

    def read(raw: Raw) -> Fields:
        require_no_scaling_beside(raw)
        found: Any = windows.read(raw)["layers.window"]
        kinds = _kinds(found, raw["num_hidden_layers"])
        of_kinds = _ropes_of(usual if raw.get(_ROPE) is None else raw[_ROPE], kinds)
        rotates = tuple(of_kinds[kind] is not None for kind in kinds)
        rotation = _rotation(ropes, theta, of_kinds, length_of(raw))
        return {"layers.window": found, "layers.rotates": one_or_each(rotates), **rotation}

    def write(config: ModelConfig) -> Raw:
        written = ropes.write(config)[_ROPE]
        if config.positions.local_theta is None:
            written[_WINDOWED] = written[_FULL]
        found = {
            kind: written[kind] if _rotates(config, kind) else None for kind in (_FULL, _WINDOWED)
        }
        return {**windows.write(config), _ROPE: found}

    return Keys((*windows.names, _ROPE), read, write)


def _kinds(windows: Any, layers: int) -> list[str]:
    """The kind of each layer. windows: of all layers, or of each."""
    each = windows if isinstance(windows, tuple) else (windows,) * layers
    return [_FULL if window is None else _WINDOWED for window in each]


def _ropes_of(stated: Any, kinds: Sequence[str]) -> dict[str, Mapping[str, Any] | None]:
    """The rope of each kind that the model has, or that rope_parameters describes."""
    described = stated or {}
    used = [kind for kind in (_FULL, _WINDOWED) if kind in kinds or described.get(kind)]
    return {kind: _rope_of(stated, kind) for kind in used}


def _rope_of(stated: Any, kind: str) -> Mapping[str, Any] | None:
    """The rope of a kind of layers, without its settings for images. Raises CorruptCheckpoint if there is none."""
    if not isinstance(stated, Mapping) or kind not in stated:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_ROPE} should have {kind}, which may be null, found {stated!r:.80}"
        )
    rope = stated[kind]
    return rope and {key: value for key, value in rope.items() if key not in _OF_IMAGES}


def _rotation(
    keys: Keys, theta: float, ropes: Mapping[str, Mapping[str, Any] | None], around: Raw
) -> Fields:
    """Base and scaling, by the ropes of the kinds of layers that rotate. around: the key of the longest text."""
    rotating = {kind: rope for kind, rope in ropes.items() if rope is not None}
    require_bases(rotating)
    if not rotating:
        return {"positions.theta": theta}
    one, *others = rotating.values()
    if others == [one] or not others:
        rotating = {_FULL: one, _WINDOWED: {"rope_theta": one["rope_theta"]}}
        given = keys.read({**around, _ROPE: rotating})
        return {**given, "positions.local_theta": None}
    return keys.read({**around, _ROPE: rotating})


def _rotates(config: ModelConfig, kind: str) -> bool:
    """True if rope rotates this kind of layers. Raises NotExpressible if it rotates only some of them."""
    types = layer_types(config)
    rotates = {
        each.rotates for each, name in zip(config.layers, types, strict=True) if name == kind
    }
    if len(rotates) > 1:
        raise NotExpressible(
            f"the model's layers.rotates differs among the layers of {kind}, which {_ROPE} gives one rope"
        )
    return rotates != {False}
