"""Numbers in records, by a path of fields such as `score.toxicity`."""

import sys
from collections.abc import Mapping
from typing import Any

from formats.errors import CorruptCheckpoint


def number_at(record: Any, path: str, where: str) -> float | None:
    """Return the number at a path of fields; None if a field on the path is null.

    Raises CorruptCheckpoint for a missing field, and for a value that is no finite number.
    """
    value = record
    for field in path.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or field not in value:
            known = ", ".join(value) if isinstance(value, Mapping) else "no fields"
            raise CorruptCheckpoint(f"{where}: has no {path}; there are {known}")
        value = value[field]
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A number of JSON may be larger than any float.
    if not is_number or not abs(value) <= sys.float_info.max:
        raise CorruptCheckpoint(f"{where}: {path} should be a number, found {value!r:.40}")
    return float(value)
