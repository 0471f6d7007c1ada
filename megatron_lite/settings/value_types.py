"""The types of settings, and the functions that read their values from words."""

import argparse
import types
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, get_args, get_type_hints

from megatron_lite.settings.config import subjects


@cache
def type_hints() -> dict[str, Any]:
    """Return the type of every setting, without its `| None`."""
    found = {}
    for kind in subjects().values():
        for name, hint in get_type_hints(kind).items():
            members = [member for member in get_args(hint) if member is not types.NoneType]
            found[name] = members[0] if isinstance(hint, types.UnionType) else hint
    return found


def element_type(hint: Any) -> Any:
    """Return int for both int and tuple[int, ...]."""
    # isinstance(tuple[int, ...], type) is true in Python 3.10.
    return get_args(hint)[0] if get_args(hint) else hint


def value_reader(kind: type, choices: Collection[str] = ()) -> Callable[[str], Any]:
    """Return the function that reads a word. A choice is accepted in any case."""
    if kind is bool:
        return _boolean
    if not choices:
        return kind
    known = {choice.casefold(): choice for choice in choices}
    return lambda word: known.get(word.casefold(), word)


def _boolean(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, found {word!r}")
    return word.lower() == "true"
