"""Messages of chat requests, as chat templates expect them."""

from typing import Any

from megatron_lite.data.tool_calls import with_parsed_arguments
from megatron_lite.inference.server.errors import Refused


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation, with texts as contents. Raises Refused."""
    if not isinstance(value, list) or not value:
        instead = "it is missing" if value is None else f"found {value!r:.60}"
        raise Refused(f"messages should be a list of one message or more; {instead}", "messages")
    found = []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(
                f"message {number} should be an object with role and content, found {message!r:.60}",
                "messages",
            )
        content = message.get("content")
        only_calls = content is None and bool(message.get("tool_calls"))
        text = "" if only_calls else _content(content, number)
        found.append({**with_parsed_arguments(message), "content": text})
    return found


def _content(value: Any, number: int) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in value
    ):
        return "".join(str(part.get("text", "")) for part in value)
    raise Refused(
        f"the content of message {number} should be text, found {value!r:.60}", "messages"
    )
