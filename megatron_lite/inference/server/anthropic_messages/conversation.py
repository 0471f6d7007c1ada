"""The messages of Anthropic's API, as messages of a chat: texts, thinking, calls of tools and their results."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.image_parts import read_image_url
from megatron_lite.inference.server.openai_answers import REASONING

FIELD = "messages"
_ROLES = ("user", "assistant", "system")


def read_conversation(messages: Any, system: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat. system: a text, or blocks of text; None without one. Raises Refused."""
    if not isinstance(messages, list) or not messages:
        instead = "it is missing" if messages is None else f"found {messages!r:.60}"
        raise Refused(f"messages should be a list of one message or more; {instead}", FIELD)
    found: list[dict[str, Any]] = []
    if system is not None:
        found.append({"role": "system", "content": _text(system, "system", "system")})
    for number, message in enumerate(messages):
        found += _messages_of(message, f"message {number}")
    if found[-1]["role"] == "assistant":
        raise Refused(
            "the last message is the assistant's: the server begins a new message, and continues none",
            FIELD,
        )
    return found


def _messages_of(message: Any, name: str) -> list[dict[str, Any]]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise Refused(
            f"{name} should be an object with one of the roles {', '.join(_ROLES)}, found {message!r:.60}",
            FIELD,
        )
    blocks = _blocks(message.get("content"), f"the content of {name}", FIELD)
    if role == "assistant":
        return [_assistant(blocks, name)]
    return list(_others(role, blocks, name))


def _assistant(blocks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the message of an answer: thinking, text and calls."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            message["content"] += _word(block, "text", name)
        elif kind == "thinking":
            message[REASONING] = message.get(REASONING, "") + _word(block, "thinking", name)
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_call(block, name))
        elif kind != "redacted_thinking":  # another server's thinking, which nobody can read
            raise _unknown(kind, name)
    return message


def _call(block: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise Refused(f"the input of a call in {name} should be an object", FIELD)
    arguments = json.dumps(given, ensure_ascii=False)
    function = {"name": _word(block, "name", name), "arguments": arguments}
    return {"id": _word(block, "id", name), "type": "function", "function": function}


def _others(role: str, blocks: list[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of a user's or the system's blocks. Each result of a tool is a message of its own."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            parts.append({"type": "text", "text": _word(block, "text", name)})
        elif kind == "image" and role == "user":
            parts.append(_image(block, name))
        elif kind == "tool_result" and role == "user":
            if parts:
                yield {"role": role, "content": _joined(parts)}
                parts = []
            call = _word(block, "tool_use_id", name)
            content = _text(block.get("content") or "", f"a result of {name}", FIELD)
            yield {"role": "tool", "tool_call_id": call, "content": content}
        else:
            raise _unknown(kind, name)
    if parts or not blocks:
        yield {"role": role, "content": _joined(parts)}


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return one text, or the parts if there is an image among them."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _image(block: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an image as a part of a chat's message."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind != "base64":
        raise Refused(
            f"the source of an image in {name} should be of the type base64, found {kind!r:.60}",
            FIELD,
        )
    uri = f"data:;base64,{_word(source, 'data', name)}"
    return {"type": "image", "image": read_image_url(uri, name)}


def _text(content: Any, name: str, field: str) -> str:
    """Return a text, or the texts of blocks, joined."""
    blocks = _blocks(content, name, field)
    other = next((block["type"] for block in blocks if block["type"] != "text"), None)
    if other is not None:
        raise _unknown(other, name, field)
    return "".join(_word(block, "text", name, field) for block in blocks)


def _blocks(content: Any, name: str, field: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and all(
        isinstance(block, dict) and isinstance(block.get("type"), str) for block in content
    ):
        return content
    raise Refused(f"{name} should be a text or a list of blocks, found {content!r:.60}", field)


def _word(block: Mapping[str, Any], key: str, name: str, field: str = FIELD) -> str:
    word = block.get(key)
    if not isinstance(word, str):
        raise Refused(f"a {block['type']} of {name} needs the text {key}", field)
    return word


def _unknown(kind: str, name: str, field: str = FIELD) -> Refused:
    return Refused(
        f"{name} has a block of the type {kind!r:.60}, which is not supported here", field
    )
