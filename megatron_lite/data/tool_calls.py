"""Arguments of tool calls in messages: OpenAI's messages have JSON text, and chat templates expect objects."""

import json
from collections.abc import Mapping
from typing import Any


def with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have objects as arguments. Arguments that are no JSON text stay as they are.

    A template that writes arguments as JSON would write a text with quotes around it and `\\"` inside.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    """Return a call with its arguments parsed: {"function": {"name", "arguments"}}, or {"name", "arguments"} alone."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _parsed(call["function"])}
    return _parsed(call)


def _parsed(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(function)
    try:
        return {**function, "arguments": json.loads(arguments)}
    except (ValueError, RecursionError):
        return dict(function)
