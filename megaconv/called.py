"""Checks the arguments of the Python interface: a wrong name or type is an error at once, which lists the valid ones.

Without this check, a misspelled option or text instead of a number would fail deep inside, with an unrelated message.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from megaconv.options import options_of
from megaconv.options.values import plain

P = ParamSpec("P")
R = TypeVar("R")

_WIDER: Mapping[Any, tuple[type, ...]] = {int: (Integral,), float: (Real,)}
"""For each declared type, the abstract type that numpy's numbers belong to as well."""

_MODULES = re.compile(r"(?:\w+\.)+(?=\w)")
"""The modules before a type's name. Python's versions differ: `pathlib.Path`, `pathlib._local.Path`."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function with checked arguments: TypeError for an unknown argument, or for a value of another type."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _require_known(function.__name__, kwargs, signature)
        hints = get_type_hints(function)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}(): {error}") from None
        for name, value in bound.arguments.items():
            require_type(f"{function.__name__}({name}={value!r:.200})", value, hints[name])
            bound.arguments[name] = plain(value)
        return function(*bound.args, **bound.kwargs)

    return call


def _require_known(called: str, given: Iterable[str], signature: inspect.Signature) -> None:
    for name in given:
        if name not in signature.parameters:
            raise unknown(called, name, signature.parameters)


def unknown(called: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for an option that doesn't exist, with the nearest name that does."""
    fields = {each.field: parameter for parameter, each in options_of(called).items()}
    near = [fields[name]] if name in fields else get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"help(megaconv.{called}) lists the options"
    return TypeError(f"{called}() has no option {name!r}; {hint}")


def require_type(where: str, value: object, hint: Any) -> None:
    """Raises TypeError if the value doesn't fit the type hint. where: how the message names the argument."""
    if not _fits(value, hint):
        raise TypeError(f"{where}: expected {spelled(hint)}, found {type(value).__name__}")


def _fits(value: object, hint: Any) -> bool:
    """True if a value fits a type hint. Type arguments are checked for sequences and mappings, not for other types.

    A bool doesn't count as a number, and text doesn't count as a sequence.
    """
    origin = get_origin(hint)
    if origin is Sequence and isinstance(value, (list, tuple)):
        return all(_fits(each, get_args(hint)[0]) for each in value)
    if origin is Mapping and isinstance(value, Mapping):
        of_keys, of_values = get_args(hint)
        return all(_fits(key, of_keys) and _fits(each, of_values) for key, each in value.items())
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if hint is Any:
        return True
    kinds = _WIDER.get(hint, (origin or hint,))
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) and not (origin and isinstance(value, (str, bytes)))


def spelled(hint: Any) -> str:
    """A type hint as text, such as `str | Path | None`, without the modules of its types."""
    if get_origin(hint) is Union:  # Python 3.10 makes one of `str | None` where the default is None
        return " | ".join(map(spelled, get_args(hint)))
    return "None" if hint is NoneType else _MODULES.sub("", inspect.formatannotation(hint))
