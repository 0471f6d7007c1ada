"""Rope of two kinds of layers, with and without a window, in the forms of transformers 4 and 5.

transformers 4 writes rope_theta and rope_scaling for layers without a window, and (Gemma 3) rope_local_base_freq for
layers with one. transformers 5 writes one rope_parameters for each kind. megaconv reads both forms and writes both,
since neither version reads the other's.
"""

from collections.abc import Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_number
from megaconv.families.parts.rope import read_rope
from megaconv.model.config import ModelConfig

KINDS = ("full_attention", "sliding_attention")
_LOCAL = "rope_local_base_freq"
_PERCENT, _LENGTH = "partial_rotary_factor", "max_position_embeddings"

Rope = tuple[float, dict[str, Any] | None]
"""(base, scaling)."""


def layer_ropes(
    theta: float, local_theta: float | None = None, *, kinds: tuple[str, str] = KINDS
) -> Keys:
    """Rope of both kinds of layers.

    theta, local_theta: the defaults for missing keys. local_theta None: layers with a window have no separate base.
    kinds: the words for layers without a window and with one.
    """

    def read(raw: Raw) -> Fields:
        full, windowed = _nested(raw, theta, local_theta, kinds) or _flat(raw, theta, local_theta)
        given = {"positions.theta": full[0], "positions.scaling": full[1]}
        if local_theta is None and full == windowed:
            return given
        if windowed[1] is not None:
            raise NotExpressible(
                f"{CONFIG_NAME}: rope scaling of layers with a window alone is not supported: {windowed[1]}"
            )
        return given | {"positions.local_theta": windowed[0]}

    def write(config: ModelConfig) -> Raw:
        positions = config.positions
        old: dict[str, Any] = {
            "rope_theta": positions.theta,
            "rope_scaling": positions.scaling and dict(positions.scaling),
        }
        own = {"rope_type": "default", **(positions.scaling or {}), "rope_theta": positions.theta}
        windowed = (
            own
            if positions.local_theta is None
            else {"rope_type": "default", "rope_theta": positions.local_theta}
        )
        if local_theta is not None:
            old[_LOCAL] = (
                positions.theta if positions.local_theta is None else positions.local_theta
            )
        return old | {"rope_parameters": dict(zip(kinds, (own, windowed), strict=True))}

    keys = (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        *([] if local_theta is None else [_LOCAL]),
    )
    return Keys(keys, read, write)


def nested_layer_ropes(theta: float, local_theta: float) -> Keys:
    """Rope of both kinds of layers, in the form of transformers 5 alone: the class reads no other keys.

    theta, local_theta: the bases if rope_parameters is missing.
    """
    ropes = layer_ropes(theta, local_theta)

    def read(raw: Raw) -> Fields:
        _require_stated_bases(raw, KINDS)
        return ropes.read({**length_of(raw), "rope_parameters": raw.get("rope_parameters")})

    def write(config: ModelConfig) -> Raw:
        return {"rope_parameters": ropes.write(config)["rope_parameters"]}

    return Keys(("rope_parameters",), read, write)


def partial_layer_ropes(
    full: tuple[float, float],
    windowed: tuple[float, float],
    *,
    missing_share: float,
    kinds: tuple[str, str] = KINDS,
) -> Keys:
    """Rope of both kinds of layers, which rotate shares of their own, in the form of transformers 5 alone.

    full, windowed: (base, share) of layers without a window and with one if rope_parameters is missing.
    missing_share: the share if rope_parameters doesn't give it. kinds: the words for layers without a window and with one.
    """
    ropes = layer_ropes(full[0], windowed[0], kinds=kinds)
    usual = {
        kind: {"rope_theta": theta, _PERCENT: share}
        for kind, (theta, share) in zip(kinds, (full, windowed), strict=True)
    }

    def read(raw: Raw) -> Fields:
        _require_stated_bases(raw, kinds)
        stated = raw.get("rope_parameters") or usual
        found = ropes.read({**length_of(raw), "rope_parameters": stated})
        if found["positions.scaling"] and (missing_share != 1.0 or raw.get(_PERCENT) is not None):
            _require_shares(stated)
        shares = [need_number(stated.get(kind) or {}, _PERCENT, missing_share) for kind in kinds]
        own = None if shares[1] == shares[0] else shares[1]
        return {
            **found,
            "positions.rotary_percent": shares[0],
            "positions.local_rotary_percent": own,
        }

    def write(config: ModelConfig) -> Raw:
        written = ropes.write(config)["rope_parameters"]
        share, own = config.positions.rotary_percent, config.positions.local_rotary_percent
        shares = dict(zip(kinds, (share, share if own is None else own), strict=True))
        parts = {kind: {**written[kind], _PERCENT: shares[kind]} for kind in kinds}
        return {"rope_parameters": parts}

    return Keys(("rope_parameters",), read, write)


def _nested(
    raw: Raw, theta: float, local_theta: float | None, kinds: tuple[str, str]
) -> tuple[Rope, Rope] | None:
    """Both ropes in the form of transformers 5; None for another form.

    A rope_scaling next to it belongs to the layers without a window. Missing bases may also be next to it.
    """
    stated = raw.get("rope_parameters")
    if not stated:
        return None
    _require_kinds(stated, kinds)
    full, windowed = (stated.get(kind) or {} for kind in kinds)
    scaled = {**full, **(raw.get("rope_scaling") or {})}
    base = need_number(raw, "rope_theta", theta)
    local_base = theta if local_theta is None else need_number(raw, _LOCAL, local_theta)
    around = length_of(raw)
    return (
        read_rope({**around, "rope_parameters": scaled}, base),
        read_rope({**around, "rope_parameters": windowed}, local_base),
    )


def length_of(raw: Raw) -> Raw:
    """The key of the longest text, to which some scalings refer, if config.json has it."""
    return {_LENGTH: raw[_LENGTH]} if _LENGTH in raw else {}


def _require_stated_bases(raw: Raw, kinds: tuple[str, str]) -> None:
    """Raise CorruptCheckpoint if rope_parameters lacks the base of a kind of layers that the model has."""
    require_no_scaling_beside(raw)
    stated, types = raw.get("rope_parameters"), raw.get("layer_types")
    if stated is None:
        return
    _require_kinds(stated, kinds)
    used = types if isinstance(types, list) else ()
    described = {kind: stated.get(kind) for kind in kinds}
    require_bases({kind: rope for kind, rope in described.items() if rope or kind in used})


def require_no_scaling_beside(raw: Raw) -> None:
    """Raise NotExpressible for a rope_scaling. transformers puts it in place of rope_parameters, and fails."""
    scaling = raw.get("rope_scaling")
    if scaling:
        raise NotExpressible(
            f"{CONFIG_NAME}: rope_scaling {scaling!r:.80} is not supported in this architecture: write it into rope_parameters"
        )


def require_bases(ropes: Mapping[str, Any]) -> None:
    """Raise CorruptCheckpoint if a rope has no base. Classes that read no rope_theta beside rope_parameters have no
    default for it.

    ropes: kind of layers -> its rope.
    """
    for kind, rope in ropes.items():
        if not isinstance(rope, Mapping) or rope.get("rope_theta") is None:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: rope_parameters has no rope_theta for {kind}, expected a number: write the base into the "
                "rope of each kind of layers"
            )


def _require_shares(ropes: Mapping[str, Any]) -> None:
    """Raise NotExpressible if a rope has no share. If a rope is scaled, transformers takes another share for it than
    without scaling."""
    for kind, rope in ropes.items():
        if isinstance(rope, Mapping) and _PERCENT not in rope:
            raise NotExpressible(
                f"{CONFIG_NAME}: rope_parameters has no {_PERCENT} for {kind}, which is not supported with rope scaling: write "
                "the share into the rope of each kind of layers"
            )


def _require_kinds(stated: Any, kinds: tuple[str, str]) -> None:
    if not isinstance(stated, dict) or not any(
        isinstance(stated.get(kind), dict) for kind in kinds
    ):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: rope_parameters should have {' and '.join(kinds)}, found {stated!r}"
        )


def _flat(raw: Raw, theta: float, local_theta: float | None) -> tuple[Rope, Rope]:
    full = read_rope(raw, theta)
    if local_theta is None and full[0] != theta:
        raise NotExpressible(
            f"{CONFIG_NAME}: rope_theta {full[0]:g} without rope_parameters is not supported in this architecture: transformers 5 "
            f"takes {theta:g} for layers with a window then; write the bases into rope_parameters"
        )
    return full, (full[0] if local_theta is None else need_number(raw, _LOCAL, local_theta), None)
