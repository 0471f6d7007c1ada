"""Messages of chat requests, as chat templates expect them."""

from typing import Any

from megatron_lite.data.images.files import ImageFile
from megatron_lite.data.tool_calls import with_parsed_arguments
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.image_parts import read_image_url


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation. Raises Refused.

    A content is a text. With an image, it is a list of parts (see with_pictures).
    """
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


def _content(value: Any, number: int) -> str | list[dict[str, Any]]:
    """Return a text, or parts if there is an image among them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _refused(value, number)
    parts = [_part(part, number) for part in value]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: Any, number: int) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise _refused(part, number)
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": str(part.get("text", ""))}
    if kind == "image_url":
        image = read_image_url(part.get("image_url"), f"message {number}")
        return {"type": "image", "image": image}
    if kind == "image" and isinstance(part.get("image"), ImageFile):  # of another route
        return part
    raise _refused(part, number)


def _refused(value: Any, number: int) -> Refused:
    return Refused(
        f"the content of message {number} should be a text, or parts of the types text and image_url, found {value!r:.60}",
        "messages",
    )
