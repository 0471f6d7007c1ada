"""Arguments of tool calls in messages: OpenAI's messages have JSON text, and chat templates expect objects."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_JOINED = re.compile(r"""\+\s*[\w.\[\]'"]*(\.|\[['"])arguments\b['"\]]*\s*[+}]""")
"""A template's expression that joins arguments to other text. DeepSeek's have it."""


def with_arguments_for(
    messages: Sequence[Mapping[str, Any]], template: str
) -> list[Mapping[str, Any]]:
    """Return the messages with arguments as JSON text, if the template can't take objects."""
    if not _JOINED.search(template):
        return list(messages)
    return [_with_calls(message, _written) for message in messages]


def with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have objects as arguments. Arguments that are no JSON text stay as they are.

    A template that writes arguments as JSON would write a text with quotes around it and `\\"` inside.
    """
    return _with_calls(message, _parsed)


def _with_calls(
    message: Mapping[str, Any], changed: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return a message with its calls changed: {"function": {"name", "arguments"}}, or {"name", "arguments"} alone."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    made: list[Any] = []
    for call in calls:
        if not isinstance(call, dict):
            made.append(call)
        elif isinstance(call.get("function"), dict):
            made.append({**call, "function": changed(call["function"])})
        else:
            made.append(changed(call))
    return {**message, "tool_calls": made}


def _written(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return dict(function)
    return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _parsed(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(function)
    try:
        return {**function, "arguments": json.loads(arguments)}
    except (ValueError, RecursionError):
        return dict(function)
