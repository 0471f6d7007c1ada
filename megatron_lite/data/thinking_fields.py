"""Thinking in messages of the assistant: clients send it as `reasoning_content` or `reasoning`, and each template reads its own field.

| a template reads | it gets |
|---|---|
| `reasoning_content` or `reasoning` | the thinking in the field that it reads |
| parts of the content with the type `thinking` (Magistral, Ministral 3) | these parts: the thinking, then the text |
| `tool_plan` (Command A) | the thinking of a message with calls |

Another template gets the message as it is. GPT-OSS has rules of its own (harmony_messages.py).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

FIELDS = ("reasoning_content", "reasoning")
"""Fields with the thinking in messages of clients."""
_PLAN = "tool_plan"
_PARTS = re.compile(r"""==\s*['"]thinking['"]""")
"""A template's question for the type of a part of the content."""


def with_thinking_fields(
    messages: Sequence[Mapping[str, Any]], template: str
) -> list[Mapping[str, Any]]:
    """Return the messages with the assistant's thinking where the template reads it."""
    return [
        _changed(message, template) if message.get("role") == "assistant" else message
        for message in messages
    ]


def _changed(message: Mapping[str, Any], template: str) -> Mapping[str, Any]:
    given = [message[field] for field in FIELDS if message.get(field)]
    if not given or not isinstance(given[0], str):
        return message
    read = [field for field in FIELDS if _reads(template, field)]
    if read:
        return message if message.get(read[0]) else {**message, read[0]: given[0]}
    rest = {key: value for key, value in message.items() if key not in FIELDS}
    if _PARTS.search(template):
        return {**rest, "content": _parts(given[0], message.get("content"))}
    if message.get("tool_calls") and not message.get(_PLAN) and _reads(template, _PLAN):
        return {**rest, _PLAN: given[0]}
    return message


def _reads(template: str, field: str) -> bool:
    """Return whether a template reads a field of a message: `message.field`, `message['field']`, `message.get('field')`."""
    return bool(re.search(rf"""(\.|['"]){field}\b""", template))


def _parts(thinking: str, content: Any) -> list[Any]:
    """Return the content with the thinking before it."""
    parts: list[Any] = [{"type": "thinking", "thinking": thinking, "closed": True}]
    if isinstance(content, list):
        return parts + content
    return [*parts, {"type": "text", "text": content}] if content else parts
