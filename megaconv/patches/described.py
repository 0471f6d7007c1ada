"""Dataclasses as plain values and back: a patch stores the model and the training state of its newer checkpoint.

A dataclass becomes a dictionary of its fields, and a tuple stays a tuple. The types of the fields say which dataclass
to build, so that no name in a file chooses a class.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def plain(value: Any) -> Any:
    """The value with dictionaries for dataclasses and mappings."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value) if each.init}
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(plain(inner) for inner in value)
    return value


def built(kind: type[T], value: Any) -> T:
    """The dataclass of a dictionary. Raises ValueError if the dictionary has other fields than the class."""
    hints = get_type_hints(kind)
    known = {each.name for each in fields(kind) if each.init}  # type: ignore[arg-type]
    if not isinstance(value, dict) or not set(value) <= known:
        raise ValueError(f"is not the description of a {kind.__name__}")
    return kind(**{name: _built(hints[name], inner) for name, inner in value.items()})


def _built(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    kind = next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), None)
    if kind is None:
        return value
    if get_origin(hint) is tuple:
        return tuple(built(kind, inner) for inner in value)  # type: ignore[arg-type]
    return built(kind, value)  # type: ignore[arg-type]
