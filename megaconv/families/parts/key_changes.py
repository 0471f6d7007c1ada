"""Declarations of keys made from those of another family, for families that differ from it in some keys.

without_keys(keys, "mlp_bias")                  the family has no such key
with_keys(keys, STARCODER2.keys, "norm_epsilon") declared as in another family
with_defaults(keys, {"rope_theta": 500000.0})   other values of missing keys
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megaconv.families.parts.keys import Fields, Keys, Raw

Declared = tuple[Keys, ...]


def without_keys(keys: Declared, *names: str) -> Declared:
    """The declarations without those of these keys. Raises KeyError for an unknown key."""
    _require_known(keys, names)
    return tuple(each for each in keys if not set(each.names) & set(names))


def with_keys(keys: Declared, others: Declared, *names: str) -> Declared:
    """The declarations, and another family's declarations of these keys. Raises KeyError for an unknown key.

    Declarations of the same keys are replaced.
    """
    _require_known(others, names)
    taken = tuple(each for each in others if set(each.names) & set(names))
    replaced = {name for each in taken for name in each.names}
    kept = tuple(each for each in keys if not replaced & set(each.names))
    return (*kept, *taken)


def with_defaults(keys: Declared, defaults: Mapping[str, Any]) -> Declared:
    """The declarations with other values of missing keys. Raises KeyError for an unknown key.

    Every declaration gets them, because some read keys of others: shared experts need the width of routed ones.
    """
    _require_known(keys, tuple(defaults))
    return tuple(replace(each, read=_reading(each, defaults)) for each in keys)


def _reading(declared: Keys, defaults: Mapping[str, Any]) -> Callable[[Raw], Fields]:
    return lambda raw: declared.read({**defaults, **raw})


def _require_known(keys: Declared, names: tuple[str, ...]) -> None:
    known = {name for each in keys for name in each.names}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KeyError(f"no declaration has the key {', '.join(unknown)}")
