"""How functions of the Python interface are called: a wrong name or type is said at once, with what it could be.

An option that is misspelled, or text where a number belongs, would otherwise show up far inside, in words about something else.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")

_WIDER: Mapping[Any, tuple[type, ...]] = {int: (Integral,), float: (Real,)}
"""What numpy's numbers are too."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which then raises TypeError for arguments that it doesn't have, or of other types than it declares."""
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
        return function(*args, **kwargs)

    return call


def _require_known(called: str, given: Iterable[str], signature: inspect.Signature) -> None:
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values()):
        return
    for name in given:
        if name not in signature.parameters:
            raise unknown(called, name, signature.parameters)


def unknown(called: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for an option that there is none of, with the one that was probably meant."""
    near = get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"help(megaconv.{called}) lists those that there are"
    return TypeError(f"{called}() has no option {name!r}; {hint}")


def require_type(where: str, value: object, hint: Any) -> None:
    """Raises TypeError."""
    if not _fits(value, hint):
        raise TypeError(f"{where}: expected {spelled(hint)}, found {type(value).__name__}")


def _fits(value: object, hint: Any) -> bool:
    """Of generic types only the outermost is looked at. A bool is no number here, nor is text a sequence."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if hint is Any:
        return True
    kinds = _WIDER.get(hint, (origin or hint,))
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) and not (origin and isinstance(value, (str, bytes)))


def spelled(hint: Any) -> str:
    """`str | Path | None`: without the modules that types are from."""
    text = inspect.formatannotation(hint)
    for module in ("collections.abc.", "pathlib.", "typing."):
        text = text.replace(module, "")
    return ".".join(text.split(".")[-1:]) if "[" not in text and "|" not in text else text
