"""Rope of two kinds of layers, of which those without a window may rotate a share of the pairs that a whole head has.

    rope_parameters   {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                       "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}

The frequencies are those of a whole head, so that this differs from a rotating part of a head. transformers' type
`default` doesn't read partial_rotary_factor here. Source: _compute_proportional_rope_parameters of transformers 5.23.
"""

from collections.abc import Callable
from typing import Any

from megaconv.errors import CorruptCheckpoint, UnknownFamily
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_number
from megaconv.model.config import ModelConfig

_KEY, _SHARE, _THETA = "rope_parameters", "partial_rotary_factor", "rope_theta"
KINDS = ("full_attention", "sliding_attention")


def proportional_ropes(
    *,
    theta: float,
    share: float,
    local_theta: float,
    beside: float | None = None,
    needed: Callable[[Raw], tuple[str, ...]] = lambda raw: KINDS,
) -> Keys:
    """Rope of both kinds of layers.

    theta, share, local_theta: the defaults if rope_parameters is missing, of layers without a window and with one.
    beside: the base of both kinds if rope_theta is neither in their objects nor beside them; None if each kind has its
    default, and no key beside these objects counts. needed: the kinds that rope_parameters must have.
    """
    usual = {
        KINDS[0]: {"rope_type": "proportional", _SHARE: share, _THETA: theta},
        KINDS[1]: {"rope_type": "default", _THETA: local_theta},
    }

    def read(raw: Raw) -> Fields:
        stated: Any = raw.get(_KEY) or usual
        _require_kinds(stated, needed(raw))
        full, windowed = (_with_type(stated.get(kind) or {}) for kind in KINDS)
        bases = theta, local_theta
        if beside is not None:
            common = need_number(raw, _THETA, beside)
            bases = common, common
            full.setdefault(_SHARE, need_number(raw, _SHARE, 1.0))
        _require_types(full, windowed)
        return {
            "positions.theta": need_number(full, _THETA, bases[0]),
            "positions.scaling": _scaling(full),
            "positions.local_theta": need_number(windowed, _THETA, bases[1]),
        }

    names = (_KEY,) if beside is None else (_KEY, _THETA, _SHARE)
    return Keys(names, read, _write)


def _with_type(stated: Raw) -> dict[str, Any]:
    """A rope object whose kind has the newer of two names, `type` and `rope_type`."""
    return {"rope_type": stated.get("type", "default"), **stated}


def _require_kinds(stated: Any, needed: tuple[str, ...]) -> None:
    if not isinstance(stated, dict) or not all(
        isinstance(stated.get(kind), dict) for kind in needed
    ):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_KEY} should have {' and '.join(needed)}, found {stated!r}"
        )


def _require_types(full: Raw, windowed: Raw) -> None:
    """Raise UnknownFamily for other types of rope."""
    kinds = full["rope_type"], windowed["rope_type"]
    if kinds[0] not in ("default", "proportional") or kinds[1] != "default":
        raise UnknownFamily(
            f"{CONFIG_NAME}: {_KEY} has rope of types {kinds[0]!r} and {kinds[1]!r}; supported are "
            "'proportional' or 'default' without a window, and 'default' with one"
        )


def _scaling(full: Raw) -> dict[str, Any] | None:
    if full["rope_type"] == "default":
        return None
    factor = {"factor": full["factor"]} if "factor" in full else {}
    share = need_number(full, _SHARE, 1.0)
    return {"rope_type": "proportional", _SHARE: share, **factor}


def _write(config: ModelConfig) -> Raw:
    positions = config.positions
    base, scaling = positions.theta, positions.scaling or {}
    local = base if positions.local_theta is None else positions.local_theta
    full = {"rope_type": "default", **scaling, _THETA: base}
    windowed = {"rope_type": "default", _THETA: local}
    return {_KEY: dict(zip(KINDS, (full, windowed), strict=True))}
