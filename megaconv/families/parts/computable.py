"""Numbers of a config.json with which no layer computes: negative sizes and limits, roots of negative numbers, powers of them.

Python and transformers accept many of them, and compute something that nobody has trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.model.ceilings import SIZE_FIELDS

_ORIGINAL = "original_max_position_embeddings"
_FURTHER_SIZES = (
    *("layers.ffn", "layers.heads", "layers.kv_heads", "layers.head_dim", "layers.chunk"),
    *("block_indexer.local", "temperature.interval"),
)
_LIMITS = (
    *("attention.score_cap", "attention.clip", "head.logit_cap", "mlp.clamp", "experts.clamp"),
    *("layers.limit", "layers.shared_limit"),
)
"""Limits of scores, logits and activations. None switches a limit off."""
_SIZES = SIZE_FIELDS.union(_FURTHER_SIZES)
_NEVER_NEGATIVE = (
    *("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    *("num_key_value_heads", "head_dim"),
)
"""Keys that aren't fields by themselves: the number of dense first layers, and sizes that other keys give in some families."""


def require_counts(where: str, raw: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise CorruptCheckpoint if one of these keys counts something, and is negative."""
    for key in _NEVER_NEGATIVE:
        if key in names and _is_negative(raw.get(key)):
            raise CorruptCheckpoint(
                f"{where}: {key} should be 0 or more, found {raw[key]}; correct it"
            )


def require_count(where: str, raw: Mapping[str, Any], key: str, default: int) -> int:
    """The number of layers that a key states; 0 for null. Raises CorruptCheckpoint for anything else."""
    value = raw.get(key, default)
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise CorruptCheckpoint(
            f"{where}: {key} should be 0 or more, found {value!r:.40}; correct it"
        )
    return value


def require_computable(
    where: str, found: Mapping[str, Any], raw: Mapping[str, Any], names: Sequence[str]
) -> None:
    """Raise CorruptCheckpoint for a number with which no layer computes.

    where: the file's name. found: fields by dotted name. names: the keys of `raw` that gave them.
    """
    for field, value in found.items():
        for expected, number in _wrong(field, value):
            key, stated = _culprit(raw, names, number)
            called = _called(field)
            what = key if called in ("", key) else f"{key}: {called}"
            raise CorruptCheckpoint(
                f"{where}: {what} should be {expected}, found {stated}; correct it"
            )


def _wrong(field: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (what was expected, a number of the field that isn't it)."""
    is_size = field in _SIZES or field.endswith(("epsilon", "rotary_percent"))
    for number in value if isinstance(value, tuple) else (value,):
        if field == "positions.scaling" and isinstance(number, Mapping):
            length = number.get(_ORIGINAL)
            if _is_negative(length) or length == 0:
                yield "a positive number", length
        elif _should_be_positive(field, number):
            yield "a positive number", number
        elif is_size and _is_negative(number):
            yield "0 or more", number
        elif field.endswith("rotary_percent") and type(number) is float and not number <= 1:
            yield "1 or less", number


def _should_be_positive(field: str, number: Any) -> bool:
    """True for a base of rope or a limit that isn't above 0. A limit of None is none."""
    if field in _LIMITS:
        return number is not None and not 0 < number < inf
    return field.endswith("theta") and (_is_negative(number) or number == 0)


def _called(field: str) -> str:
    """The words for a field whose key is an object, or one of several names."""
    if field in ("positions.theta", "positions.local_theta"):
        return "rope_theta"
    if field == "positions.scaling":
        return _ORIGINAL
    if field.endswith("rotary_percent"):
        return "the rotating share of a head"
    if field == "attention.clip":
        return "clip_qkv"
    return "the epsilon of norms" if field.endswith("epsilon") else ""


def _culprit(raw: Mapping[str, Any], names: Sequence[str], number: Any) -> tuple[str, Any]:
    """(the key that gave a wrong number, its value); all keys and the number itself if none of them is negative."""
    present = [name for name in names if name in raw]
    for name in present:
        each = raw[name] if isinstance(raw[name], list) else [raw[name]]
        if any(map(_is_negative, each)):
            return name, raw[name]
    return ", ".join(present) or "a size that follows from other keys", number


def _is_negative(value: Any) -> bool:
    return type(value) in (int, float) and value < 0
