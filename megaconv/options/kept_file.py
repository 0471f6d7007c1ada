"""Files that say which parts of a model stay: `{"keep": {"layers.3": [0, 2, 5]}}`. The ranking commands of the trainer write them."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from formats.ceilings import SIDECAR_BYTES
from megaconv.errors import CorruptCheckpoint, UsageError
from megaconv.local_paths import local_path

KEEP = "keep"
"""The key of such a file under which the parts are."""

Kept = Mapping[str, Sequence[int]]
"""Layers, MLPs or others by name -> the numbers of their parts that stay, such as experts, in rising order."""


@dataclass(frozen=True)
class KeptFile:
    """A kind of such files."""

    part: str
    """The part that is numbered, such as `expert`, for messages."""
    holds: str
    """The content of the file, for messages."""
    places: re.Pattern[str]
    """The names of what has these parts."""
    examples: str
    """Two such names, for messages."""
    command: str
    """The command that writes such a file."""

    def path(self, given: str | Path) -> Path:
        """The path of such a file. Raises UsageError for a URI and for an empty text."""
        if given == "":
            raise UsageError("'': is an empty path; is a variable unset that it was made of?")
        return local_path(given)

    def read(self, path: Path) -> dict[str, tuple[int, ...]]:
        """Return the numbers by place, in rising order. Raises UsageError, CorruptCheckpoint."""
        from formats.regular_files import read_json  # most commands read no such file

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            """The object. Python takes the last value of a key that is there twice."""
            for name, count in Counter(name for name, _ in pairs).items():
                if count > 1:
                    raise CorruptCheckpoint(
                        f"{path}: has the key {name!r:.80} twice; name each key of an object once"
                    )
            return dict(pairs)

        found = read_json(path, SIDECAR_BYTES, object_pairs_hook=unique)
        places = found.get(KEEP) if isinstance(found, dict) else None
        if not isinstance(places, dict) or not places:
            raise self._unlike(path, f'an object "{KEEP}" with {self.holds}')
        return {place: self._numbers(places[place], place, path) for place in places}

    def _numbers(self, numbers: Any, place: str, path: Path) -> tuple[int, ...]:
        if not self.places.fullmatch(place):
            raise self._unlike(path, f"names such as {self.examples} in place of {place!r:.80}")
        is_list = isinstance(numbers, list) and bool(numbers)
        if not is_list or not all(type(each) is int and each >= 0 for each in numbers):
            raise self._unlike(path, f"a list of numbers from 0 for {place}")
        return rising(numbers, f"{path}: {place}", self.part)

    def _unlike(self, path: Path, expected: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{path}: expected {expected}; write it with `{self.command}`")


def rising(found: Iterable[int], where: str, part: str) -> tuple[int, ...]:
    """The numbers in rising order. Raises UsageError if one is there twice. part: the part that is numbered."""
    numbers = tuple(sorted(found))
    for number, following in pairwise(numbers):
        if number == following:
            raise UsageError(f"{where}: names {part} {number} twice; name each {part} once")
    return numbers
