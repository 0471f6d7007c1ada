"""Values that users write as words: sizes with units, layer splits, adapters with weights, key=value pairs.

Each function also takes the value itself, as a Python program passes it.
"""

import re
from collections.abc import Iterable, Mapping
from math import isfinite
from numbers import Integral, Real
from operator import index, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from formats.wording import counted
from megaconv.errors import UsageError


def plain(value: Any) -> Any:
    """A numpy number as Python's own int or float, which can be written to files; any other value unchanged."""
    if isinstance(value, (bool, int, float)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


class AdapterChoice(NamedTuple):
    """An adapter to merge into the weights."""

    place: str
    """A directory or a Hub id."""
    weight: float = 1.0
    """The factor of the adapter's weight deltas."""


def adapter_choices(words: Iterable[str | Path | AdapterChoice]) -> tuple[AdapterChoice, ...]:
    """The adapters that words such as `DIR` or `DIR:0.5` name. Raises UsageError for a weight that isn't a number."""
    return tuple(
        word if isinstance(word, AdapterChoice) else _adapter_choice(str(word)) for word in words
    )


def _adapter_choice(word: str) -> AdapterChoice:
    place, weight = with_number(word, "write DIR or DIR:WEIGHT, such as my-adapter:0.5")
    return AdapterChoice(place) if weight is None else AdapterChoice(place, weight)


def with_number(word: str, remedy: str) -> tuple[str, float | None]:
    """The place in `PLACE:NUMBER`, and the number; None if there is none. Raises UsageError with the remedy."""
    place, colon, text = word.rpartition(":")
    if not colon or Path(word).exists() or "/" in text:
        return word, None
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not place or not isfinite(number):
        raise UsageError(f"{word}: {remedy}")
    return place, number


_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


_LEAST_BYTES = 4096
"""A smaller size is probably a number whose unit was forgotten."""


def byte_size(text: str | int, option: str = "") -> int:
    """A size in bytes: 256MiB, 5GB, 1000000. A plain number counts bytes.

    option: the option of the value, for messages. Raises UsageError.
    """
    if isinstance(text, int):
        if text < 1:
            raise UsageError(f"{option}{text}: expected 1 byte or more")
        return text
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?I?)B?\s*", text.upper())
    if not match or match[2] not in _UNITS or not float(match[1]):
        raise UsageError(
            f"{option}{text!r:.80} is not a size; write a number with a unit, such as 256MiB or 5GB"
        )
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < _LEAST_BYTES:
        raise UsageError(
            f"{option}{text!r} is {counted(size, 'byte')}, expected {_LEAST_BYTES} bytes or more; "
            "write a number with a unit, such as 256MiB or 5GB"
        )
    return size


def size_text(size: int) -> str:
    """A size as a user writes it, the inverse of `byte_size`: 5GB for 5,000,000,000."""
    for unit, number in sorted(_UNITS.items(), key=itemgetter(1), reverse=True):
        if unit and size % number == 0:
            return f"{size // number}{unit.replace('I', 'i')}B"
    return str(size)


def numbers(text: str | Iterable[int]) -> tuple[int, ...]:
    """The numbers of a layer split: 3,5,5,3 -> (3, 5, 5, 3); an iterable of integers as a tuple.

    Raises UsageError for other text, TypeError for a value that isn't an integer.
    """
    if not isinstance(text, str):
        return tuple(_whole(each, "layer_split") for each in text)
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text.replace(" ", "")):
        raise UsageError(
            f"{text!r:.80}: write the layers of each stage separated by commas, such as 3,5,5,3"
        )
    return tuple(int(word) for word in text.replace(" ", "").split(","))


def layer_numbers(text: str | Iterable[int]) -> tuple[int, ...]:
    """Numbers of layers: 0-2,5 -> (0, 1, 2, 5); an iterable of integers as a tuple.

    Raises UsageError for other text, for no layer and for negative numbers, TypeError for a value that isn't an integer.
    """
    return _numbers(text, "layers")


def expert_numbers(text: str | Iterable[int]) -> tuple[int, ...]:
    """Numbers of experts, as above."""
    return _numbers(text, "experts")


def channel_numbers(numbers: Iterable[int]) -> tuple[int, ...]:
    """Numbers of channels as a tuple. Raises TypeError for a value that isn't an integer."""
    return tuple(_whole(each, "channels") for each in numbers)


_MOST_NUMBERS = 10_000


def _numbers(text: str | Iterable[int], kind: str) -> tuple[int, ...]:
    """kind: the things that are counted, for messages."""
    if isinstance(text, str):
        spans = [_span(word.strip()) for word in text.split(",")]
        found = tuple(number for span in spans for number in span)
        is_read = all(spans)
    else:
        found = tuple(_whole(each, kind) for each in text)
        is_read = bool(found) and min(found) >= 0
    if not is_read:
        raise UsageError(f"{text!r:.80}: write numbers of {kind} from 0, such as 0-15,24-31")
    return found


def _span(word: str) -> range:
    """The numbers of one word, such as 5 or 0-15; none for another word."""
    match = re.fullmatch(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", word, re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    is_span = first <= last < first + _MOST_NUMBERS
    return range(first, last + 1) if is_span else range(0)


def _whole(value: Any, parameter: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(
            f"{parameter} holds {value!r:.80}: expected int, found {type(value).__name__}"
        ) from None


def pairs(words: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    """The pairs of `key=value` words as a mapping; a mapping as it is. Raises UsageError."""
    if isinstance(words, Mapping):
        return dict(words)
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals or key in found:
            raise UsageError(f"{word}: write key=value, each key once")
        found[key] = value
    return found
