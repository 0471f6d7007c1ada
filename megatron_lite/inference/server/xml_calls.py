"""Calls of tools in XML, in the three forms that models write.

    <function=weather>                <invoke name="weather">                weather
    <parameter=city>                  <parameter name="city">Köln</parameter> <arg_key>city</arg_key>
    Köln                              </invoke>                              <arg_value>Köln</arg_value>
    </parameter>
    </function>

The first is that of Qwen 3.5 and Qwen3-Coder, within `<tool_call>` and `</tool_call>`. The second is that of MiniMax M2, within
`<minimax:tool_call>` and `</minimax:tool_call>`, where several calls may be. The third is that of GLM-4.5, within `<tool_call>`.
A value is text without quotes. The tool's schema says whether it is a text or JSON.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by name."""
Named = tuple[str, dict[str, Any]]
"""(name, arguments) of a call."""

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_INVOKE = re.compile(r"<invoke name=\"?([^\">\n]+)\"?>(.*?)</invoke>", re.DOTALL)
_NAMED_PARAMETER = re.compile(
    r"<parameter name=\"?([^\">\n]+)\"?>\n?(.*?)\n?</parameter>", re.DOTALL
)
_KEYED = re.compile(r"\s*([^\s<>{}\[\]\"]+)\s*((?:<arg_key>.*</arg_value>)?)\s*", re.DOTALL)
_KEY = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def read_xml_call(text: str, schemas: Schemas) -> Named | None:
    """Return a call in the form of Qwen 3.5, or None if the text is no complete call."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return None
    name, inner = found.groups()
    return name, _arguments(_PARAMETER.findall(inner), schemas.get(name, {}))


def read_keyed_call(text: str, schemas: Schemas) -> Named | None:
    """Return a call in the form of GLM-4.5, or None if the text is no complete call."""
    found = _KEYED.fullmatch(text)
    if found is None:
        return None
    name, inner = found.groups()
    return name, _arguments(_KEY.findall(inner), schemas.get(name, {}))


def read_invocations(text: str, schemas: Schemas) -> list[Named]:
    """Return the complete calls in the form of MiniMax M2."""
    return [
        (name, _arguments(_NAMED_PARAMETER.findall(inner), schemas.get(name, {})))
        for name, inner in _INVOKE.findall(text)
    ]


def _arguments(pairs: Iterable[tuple[str, str]], schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {key.strip(): _value(value, known.get(key.strip())) for key, value in pairs}


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
