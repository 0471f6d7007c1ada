"""Calls of tools as Qwen 3.5 and Qwen3-Coder write them, within `<tool_call>` and `</tool_call>`.

    <function=weather>
    <parameter=city>
    Köln
    </parameter>
    </function>

A value is text without quotes. The tool's schema says whether it is a text or JSON.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_xml_call(
    text: str, schemas: Mapping[str, Mapping[str, Any]]
) -> tuple[str, dict[str, Any]] | None:
    """Return (name, arguments) of a call, or None if the text is no complete call.

    schemas: the JSON schema of each tool's parameters, by name.
    """
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return None
    name, inner = found.groups()
    properties = schemas.get(name, {}).get("properties")
    known = properties if isinstance(properties, dict) else {}
    return name, {key: _value(value, known.get(key)) for key, value in _PARAMETER.findall(inner)}


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    # Models also write Python's words for these values.
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
