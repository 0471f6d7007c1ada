"""Calls of tools in JSON, and values that are JSON or text."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_lite.inference.server.calls.form import Named, Schemas

_ARGUMENTS = ("arguments", "parameters")
"""The key of the arguments in a call; Llama 3 writes the second one."""
_SEPARATORS = re.compile(r"[; \t\r\n]*")
"""Characters between two calls; Llama 3 writes semicolons."""
_DECODER = json.JSONDecoder()
_NAMES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
"""The names of JSON schema for the types of values that are no texts."""


def read_json(text: str, schemas: Schemas) -> list[Named]:
    """Return the calls of a list of JSON objects, or of objects that follow each other. Raises ValueError for another text."""
    is_list = text.lstrip().startswith("[")
    values = json.loads(text) if is_list else _objects(text)
    named = [_call(value) for value in values]
    return [call for call in named if call is not None]


def _call(value: Any) -> Named | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = [value[key] for key in _ARGUMENTS if key in value]
    arguments: Any = given[0] if given else {}
    identity = value.get("id")
    if not isinstance(arguments, dict):
        return None
    return Named(value["name"], arguments, identity if isinstance(identity, str) else "")


def object_at(text: str, place: int) -> tuple[dict[str, Any], int]:
    """Return (the JSON object at a place of the text, the place behind it). Raises ValueError for another text."""
    value, end = _DECODER.raw_decode(text, place)
    if not isinstance(value, dict):
        raise ValueError("the arguments are not an object")
    return value, end


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a text that has nothing else but separators. Raises ValueError for another text."""
    place = _behind_separators(text, 0)
    while place < len(text):
        value, end = object_at(text, place)
        yield value
        place = _behind_separators(text, end)


def _behind_separators(text: str, place: int) -> int:
    found = _SEPARATORS.match(text, place)
    assert found is not None, "the pattern fits the empty text"
    return found.end()


def typed(pairs: Iterable[tuple[str, str]], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments whose values are texts without quotes. The tool's schema says which of them are JSON."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {key.strip(): value_of(value, known.get(key.strip())) for key, value in pairs}


def value_of(text: str, schema: Any = None) -> Any:
    """Return the value of a text: the text if its schema says so, or if it is no JSON."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    value = _parsed(text)
    # An optional text may look like a number. A text in quotes is a text with quotes.
    stays_text = "string" in kinds and kinds.isdisjoint(_NAMES.get(type(value), ()))
    return text if stays_text else value


def _kinds(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows; an empty set if it leaves them open."""
    if not isinstance(schema, dict):
        return set()
    kind, parts = schema.get("type"), schema.get("anyOf", schema.get("oneOf"))
    if isinstance(kind, str | list):
        return {kind} if isinstance(kind, str) else set(map(str, kind))
    found = [_kinds(part) for part in parts] if isinstance(parts, list) else []
    return set().union(*found) if all(found) else set()


def _parsed(text: str) -> Any:
    # Models also write Python's words for these values.
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def written(arguments: Mapping[str, Any]) -> str | None:
    """Return arguments as JSON; None for NaN, infinity and values that are nested too deeply."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair can't be sent, except as an escape.
        return json.dumps(arguments)
    except (ValueError, RecursionError):
        return None
    return text
