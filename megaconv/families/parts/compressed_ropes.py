"""The two ropes of DeepSeek V4: one of layers with entries, which may be scaled by yarn, and one of all other layers.

Published files have rope_scaling, and both bases beside it. transformers 5 nests an object for each rope. megaconv reads
both forms and writes the published one, which all releases read. Source: DeepseekV4Config of transformers 5.23.
"""

from math import log
from typing import Any

from megaconv.errors import CorruptCheckpoint, UnknownFamily
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_number, need_size
from megaconv.families.parts.rope import read_rope
from megaconv.model.config import ModelConfig

_SHARE, _WIDTH, _OBJECT = "partial_rotary_factor", "qk_rope_head_dim", "rope_parameters"
_KINDS = ("main", "compress")
_ROPE_KEYS = ("rope_theta", "compress_rope_theta", "rope_scaling", _OBJECT, _SHARE, _WIDTH)
_THETA, _ENTRY_THETA, _USUAL_SHARE = 10000.0, 160000.0, 64 / 512


def compressed_ropes() -> Keys:
    """Both ropes. The form of published files has rope_scaling for layers with entries; transformers 5 nests objects."""
    return Keys(_ROPE_KEYS, _read_ropes, _write_ropes)


def _read_ropes(raw: Raw) -> Fields:
    parameters: Any = raw.get("rope_scaling") or raw.get(_OBJECT) or {}
    if not isinstance(parameters, dict):
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_OBJECT} should be an object, found {parameters!r:.60}"
        )
    if all(isinstance(parameters.get(kind), dict) for kind in _KINDS):
        return _read_nested(raw, parameters)
    base = need_number(raw, "rope_theta", _THETA)
    entry_base = need_number(raw, "compress_rope_theta", _ENTRY_THETA)
    flat = {key: value for key, value in parameters.items() if key not in _KINDS}
    # The class adds an attention_factor of 1 where the key is missing. null stays, and means yarn's own.
    factor = _yarn_factor(flat.get("factor")) if "attention_factor" in flat else 1.0
    return _ropes(base, entry_base, _scaling(raw, flat, factor), _share(raw))


def _share(raw: Raw) -> float:
    """The rotating share of a head in the form of published files."""
    width, head_dim = raw.get(_WIDTH), need_size(raw, "head_dim", 512)
    usual = _USUAL_SHARE if width is None else need_size(raw, _WIDTH) / head_dim
    return usual if raw.get(_SHARE) is None else need_number(raw, _SHARE, usual)


def _read_nested(raw: Raw, parameters: Raw) -> Fields:
    """Both ropes in the form of transformers 5. Missing bases and shares may be next to the object."""
    main, compress = (parameters[kind] for kind in _KINDS)
    if main.get("rope_type", "default") != "default":
        raise UnknownFamily(f"{CONFIG_NAME}: {_OBJECT} scales main, which is not supported: {main}")
    base = need_number(raw, "rope_theta", _THETA)
    bases = [need_number(each, "rope_theta", base) for each in (main, compress)]
    scaling = _scaling(raw, compress, _yarn_factor(compress.get("factor")))
    return _ropes(bases[0], bases[1], scaling, _nested_share(raw, main, compress))


def _nested_share(raw: Raw, main: Raw, compress: Raw) -> float:
    """The rotating share of a head. Raises UnknownFamily if both ropes have their own."""
    beside = 1.0 if raw.get(_SHARE) is None else need_number(raw, _SHARE, 1.0)
    first, second = (need_number(each, _SHARE, beside) for each in (main, compress))
    if first != second:
        raise UnknownFamily(
            f"{CONFIG_NAME}: {_OBJECT} has two values of {_SHARE}, {first} and {second}; only one is supported"
        )
    return first


def _yarn_factor(factor: Any) -> float:
    """yarn's attention_factor if the nested object lacks it."""
    is_scaled = type(factor) in (int, float) and factor > 1
    return 0.1 * log(factor) + 1 if is_scaled else 1.0


def _ropes(base: float, entry_base: float, scaling: Raw | None, share: float) -> Fields:
    return {
        "positions.theta": base,
        "positions.rotary_percent": share,
        "compressed.theta": entry_base,
        "compressed.scaling": scaling,
    }


def _scaling(raw: Raw, parameters: Raw, factor: float) -> Raw | None:
    """The scaling of layers with entries. factor: yarn's attention_factor if it is missing; the field lacks a factor of 1."""
    _, found = read_rope({"rope_scaling": dict(parameters)}, _THETA)
    if found is None:
        return None
    if found["rope_type"] != "yarn":
        raise UnknownFamily(
            f"{CONFIG_NAME}: rope scaling {found['rope_type']!r} is not supported in this architecture, only 'yarn' is"
        )
    given = parameters.get("attention_factor")
    stated = factor if given is None else given
    if given is None and factor != 1 and parameters.get("mscale"):
        raise UnknownFamily(
            f"{CONFIG_NAME}: mscale {parameters['mscale']!r} is not supported in this architecture; give attention_factor"
        )
    kept = {
        key: value
        for key, value in found.items()
        if key not in ("mscale", "mscale_all_dim", "attention_factor")
    }
    kept.setdefault(
        "original_max_position_embeddings", need_size(raw, "max_position_embeddings", 1048576)
    )
    return kept if stated == 1 else {**kept, "attention_factor": stated}


def _write_ropes(config: ModelConfig) -> Raw:
    positions, compressed = config.positions, config.compressed
    share = positions.rotary_percent
    return {
        "rope_theta": positions.theta,
        "compress_rope_theta": compressed.theta,
        "rope_scaling": dict(compressed.scaling) if compressed.scaling else None,
        _SHARE: share,
        _WIDTH: int(config.attention.head_dim * share),
    }
