"""JSON of values that may hold NaN or infinity. JSON has no such numbers, and Python's json writes words that others refuse."""

import json
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any


def json_text(
    value: Any,
    *,
    indent: int | None = None,
    ensure_ascii: bool = True,
    default: Callable[[Any], Any] | None = None,
) -> str:
    """Return a value as JSON: NaN and infinity are null. default: makes something that JSON has of any other object."""
    return json.dumps(
        _finite(value), indent=indent, ensure_ascii=ensure_ascii, default=default, allow_nan=False
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
