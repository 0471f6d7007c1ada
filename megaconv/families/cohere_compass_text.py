"""Cohere Compass, the language model of North Micro Vision: Command A's layers, with a rope of halves for each kind of layers.

    "rope_parameters": {"full_attention": null, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}

A kind of layers whose rope is null has no positions. Source: CohereCompassTextConfig and modeling_cohere_compass.py of
transformers 5.23.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.cohere import FAMILY as COHERE
from megaconv.families.cohere import FIXED, command_keys
from megaconv.families.parts.key_changes import without_keys
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, multiplier
from megaconv.families.parts.layer_ropes import layer_ropes, length_of
from megaconv.families.parts.windows import layer_types, windows_by_layer
from megaconv.model.config import ModelConfig
from megaconv.model.fields import one_or_each

_ROPE, _FULL, _WINDOWED = "rope_parameters", "full_attention", "sliding_attention"
_THETA = 10000.0
_ROPES = layer_ropes(_THETA, _THETA)
_WINDOWS = windows_by_layer(4096, full_every=1)
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def _read(raw: Raw) -> Fields:
    found: Any = _WINDOWS.read(raw)["layers.window"]
    layers = raw["num_hidden_layers"]
    windows = found if isinstance(found, tuple) else (found,) * layers
    kinds = [_FULL if window is None else _WINDOWED for window in windows]
    stated = raw.get(_ROPE) or {}
    used = [kind for kind in (_FULL, _WINDOWED) if kind in kinds or stated.get(kind)]
    ropes = {kind: _rope_of(raw, kind) for kind in used}
    rotates = one_or_each(tuple(ropes[kind] is not None for kind in kinds))
    return {"layers.window": found, "layers.rotates": rotates, **_rotation(ropes, length_of(raw))}


def _rope_of(raw: Raw, kind: str) -> Mapping[str, Any] | None:
    """The rope of a kind of layers, without its settings for images. Raises CorruptCheckpoint if there is none."""
    stated = raw.get(_ROPE)
    if not isinstance(stated, Mapping) or kind not in stated:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_ROPE} should have {kind}, which may be null, found {stated!r:.80}"
        )
    rope = stated[kind]
    return rope and {key: value for key, value in rope.items() if key not in _OF_IMAGES}


def _rotation(ropes: Mapping[str, Mapping[str, Any] | None], around: Raw) -> Fields:
    """Base and scaling, by the ropes of the kinds of layers that rotate. around: the key of the longest text."""
    rotating = {kind: rope for kind, rope in ropes.items() if rope is not None}
    if not rotating:
        return {"positions.theta": _THETA}
    one, *others = rotating.values()
    if others == [one] or not others:
        rotating = {_FULL: one, _WINDOWED: {"rope_theta": one.get("rope_theta", _THETA)}}
        given = _ROPES.read({**around, _ROPE: rotating})
        return {**given, "positions.local_theta": None}
    return _ROPES.read({**around, _ROPE: rotating})


def _write(config: ModelConfig) -> Raw:
    written = _ROPES.write(config)[_ROPE]
    if config.positions.local_theta is None:
        written[_WINDOWED] = written[_FULL]
    types = layer_types(config)
    ropes = {}
    for kind in (_FULL, _WINDOWED):
        layers = [each for each, name in zip(config.layers, types, strict=True) if name == kind]
        rotates = {each.rotates for each in layers}
        if len(rotates) > 1:
            raise NotExpressible(
                f"the model's layers.rotates differs among the layers of {kind}, which {_ROPE} gives one rope"
            )
        ropes[kind] = None if rotates == {False} else written[kind]
    return {**_WINDOWS.write(config), _ROPE: ropes}


_SCALE = multiplier("logit_scale", "head.divisor")


def _read_scale(raw: Raw) -> Fields:
    """The factor on logits; null means 1."""
    return _SCALE.read({} if raw.get("logit_scale") is None else raw)


_COMMAND = without_keys(command_keys(_THETA, own_size=True), _ROPE, "logit_scale")
_KEYS = (
    *_COMMAND,
    Keys((*_WINDOWS.names, _ROPE), _read, _write),
    Keys(_SCALE.names, _read_scale, _SCALE.write),
)
_FIXED = {
    name: value
    for name, value in FIXED.items()
    if name not in ("attention.qk_norm_width", "positions.interleaved")
}

FAMILY = replace(
    COHERE, name="cohere_compass_text", architectures=("CohereCompassForCausalLM",), model_type="cohere_compass_text", keys=_KEYS,
    fixed=_FIXED,
)  # fmt: skip
