"""Rope: its base, its scaling and the rotating share of each head, in the keys of transformers 4 and 5.

transformers 4 writes rope_theta and rope_scaling; transformers 5 writes rope_parameters. megaconv reads both forms and
writes the older keys, which both versions understand. Rope of two kinds of layers is in layer_ropes.py.
"""

from collections.abc import Mapping, Sequence
from math import inf, isclose, log
from typing import Any

from megaconv.errors import CorruptCheckpoint, NotExpressible
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_number, need_size
from megaconv.model.config import ModelConfig

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SCALING = {"linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",), "llama3": _LLAMA3}
"""Kind of rope scaling -> the keys that it requires."""

SECTIONS = "mrope_section"
_PERCENT = "partial_rotary_factor"
_ORIGINAL, _LENGTH = "original_max_position_embeddings", "max_position_embeddings"
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", _ORIGINAL)
_SCALED_FROM_A_LENGTH = ("llama3", "yarn", "longrope")
"""Kinds of rope scaling for which transformers 5 reads the training length next to the object, if config.json has it
there."""


def rope(
    theta: float, scaling: Mapping[str, Any] | None = None, *, stated_theta: float | None = None
) -> Keys:
    """Base and scaling of rope. theta, scaling: defaults for a config.json without them.

    stated_theta: the base of a rope object without one, if the default of transformers' class is an object with a base.
    Without an object, such a class takes that default, whatever rope_theta is.
    """

    def read(raw: Raw) -> Fields:
        # Empty rope_parameters count as given; an empty rope_scaling doesn't.
        silent = (
            scaling is not None
            and not raw.get("rope_scaling")
            and raw.get("rope_parameters") is None
        )
        usual = theta if silent or stated_theta is None else stated_theta
        base, found = read_rope(raw, usual)
        if silent and stated_theta is not None and base > 0 and base != theta:
            raise NotExpressible(
                f"{CONFIG_NAME}: rope_theta {base:g} without rope_parameters is not supported in this architecture: "
                f"transformers takes {theta:g} then; write the base and rope_type into rope_parameters"
            )
        return {"positions.theta": base, "positions.scaling": scaling if silent else found}

    def write(config: ModelConfig) -> Raw:
        found = config.positions.scaling
        plain = None if scaling is None else {"rope_type": "default"}
        return {
            "rope_theta": config.positions.theta,
            "rope_scaling": dict(found) if found else plain,
        }

    return Keys(_ROPE_KEYS, read, write)


def rope_in_one_object(rotation: Keys) -> Keys:
    """The same keys, written as transformers 5 has them, for classes that read no others."""

    def write(config: ModelConfig) -> Raw:
        written = rotation.write(config)
        scaling = written["rope_scaling"] or {"rope_type": "default"}
        return {"rope_parameters": {**scaling, "rope_theta": written["rope_theta"]}}

    return Keys(rotation.names, rotation.read, write)


def partial_rotation(default: float) -> Keys:
    """The rotating share of each head. default: the share if the key is missing."""
    return Keys(
        (_PERCENT,),
        lambda raw: {"positions.rotary_percent": rotary_percent(raw, default)},
        lambda config: {_PERCENT: config.positions.rotary_percent},
    )


def _full_rotation(raw: Raw) -> Fields:
    if rotary_percent(raw, 1.0) != 1.0:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_PERCENT} {rotary_percent(raw, 1.0)} is not supported in this architecture"
        )
    return {}


FULL_ROTATION = Keys((_PERCENT,), _full_rotation, lambda config: {})
"""The key of architectures whose heads rotate completely."""


def rotating_layers(raw: Raw) -> Sequence[Any]:
    """no_rope_layers, which has a 1 for each layer that rotates. Without the key, every no_rope_layer_interval-th layer
    doesn't rotate."""
    layers = need_size(raw, "num_hidden_layers")
    step = need_size(raw, "no_rope_layer_interval", 4)
    usual = [int((layer + 1) % step > 0) for layer in range(layers)]
    return raw.get("no_rope_layers") or usual


def rope_object(raw: Raw) -> dict[str, Any]:
    """The rope object of either version of transformers. If there is a rope_scaling, no version of transformers reads
    rope_parameters."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key) or {}, dict):
            raise CorruptCheckpoint(f"{CONFIG_NAME}: {key} should be an object, found {raw[key]!r}")
    return dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})


def sections(raw: Raw, usual: Sequence[int], *, least: int = 1) -> tuple[int, ...]:
    """The pairs of a head that rotate by time, by height and by width.

    usual: those of a file without the key. least: the smallest number that each may have.
    """
    found = rope_object(raw).get(SECTIONS) or usual
    is_list = isinstance(found, (list, tuple)) and len(found) == 3
    if not is_list or any(type(each) is not int or each < least for each in found):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {SECTIONS} should be three numbers of {least} or more, found {found!r:.80}"
        )
    return tuple(found)


def rotary_percent(raw: Raw, default: float) -> float:
    """The rotating share of each head, by the keys of either version of transformers. null means all of it, whatever
    the default."""
    found = {_PERCENT: raw.get(_PERCENT, default), **rope_object(raw)}[_PERCENT]
    return 1.0 if found is None else float(found)


def read_rope(raw: Raw, default_theta: float) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling or None), by the keys of either version of transformers. Values inside the object take
    precedence."""
    scaling = rope_object(raw)
    kinds = [name for name, value in scaling.items() if isinstance(value, dict)]
    if kinds:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: rope_parameters should be the rope of all layers in this architecture, found one of {' and '.join(kinds)}"
        )
    merged = {**raw, **scaling}
    theta = need_number(merged, "rope_theta", default_theta)
    older_kind = scaling.pop("type", None)
    kind = scaling.get("rope_type") or older_kind or "default"
    scaling["rope_type"] = kind
    scaling.pop("rope_theta", None)
    scaling.pop(_PERCENT, None)
    original = raw.get(_ORIGINAL)
    if kind in _SCALED_FROM_A_LENGTH and original is not None:
        scaling[_ORIGINAL] = original
    if kind == "yarn" and scaling.get(_ORIGINAL) is None and _LENGTH in raw:
        scaling[_ORIGINAL] = raw[_LENGTH]  # as in transformers 5
    _check_numbers(kind, scaling)
    if kind == "default":
        return theta, None
    return theta, _without_the_usual(scaling)


def _check_numbers(kind: str, scaling: Mapping[str, Any]) -> None:
    """Raises CorruptCheckpoint for a scaling that lacks a number, or that gives no finite angles."""
    for name in _SCALING.get(kind, ()):
        value: Any = scaling.get(name)
        if type(value) not in (int, float):
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: rope scaling {kind} has no number {name}: {scaling}"
            )
        if not 0 < value < inf:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {name} of rope scaling {kind} should be a positive number, found {value}"
            )
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: low_freq_factor of rope scaling llama3 should be less than high_freq_factor, found "
            f"{scaling['low_freq_factor']} and {scaling['high_freq_factor']}"
        )


def _without_the_usual(scaling: dict[str, Any]) -> dict[str, Any]:
    """The scaling without yarn's attention_factor, if that equals the value that follows from the factor."""
    given = scaling.get("attention_factor")
    if scaling["rope_type"] != "yarn" or scaling.get("mscale") or type(given) is not float:
        return scaling
    factor = scaling["factor"]
    usual = 1.0 if factor <= 1 else 0.1 * log(factor) + 1
    if not isclose(given, usual, rel_tol=1e-12):
        return scaling
    return {name: value for name, value in scaling.items() if name != "attention_factor"}
