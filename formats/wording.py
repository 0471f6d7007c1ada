"""Numbers with their nouns and verbs, lists of names, and values of files, for messages."""

from collections.abc import Collection
from reprlib import Repr

_REPR = Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = 200
_LISTED = 8
"""Number of names that an error message lists."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return `1 pair`, `2,000 pairs`. plural: if it is not the noun with an s."""
    return f"1 {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def are(number: int) -> str:
    """Return the verb for a number of things."""
    return "is" if number == 1 else "are"


def listing(names: Collection[object]) -> str:
    """Return the names as text for a message: `a, b, c and 5 more`."""
    shown = [str(name) for name in list(names)[:_LISTED]]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def brief(value: object, most: int = 80) -> str:
    """Return a value of a file as at most so many characters. Large and nested values take no longer than small ones."""
    return _REPR.repr(value)[:most]
