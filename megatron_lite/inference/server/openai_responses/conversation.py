"""The input of a response, as messages of a chat: texts, calls of tools and their results, and thinking."""

from collections.abc import Mapping
from typing import Any

from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.image_parts import read_image_url
from megatron_lite.inference.server.openai_answers import REASONING

FIELD = "input"
_ROLES = ("user", "assistant", "system", "developer")
_SYSTEM = ("system", "developer")


def read_input(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of a request's `input`: a text, or a list of items. Raises Refused.

    instructions: the system message. A system message at the start of the input follows it in the same message, because
    most chat templates have one system message.
    """
    conversation = _Conversation()
    if instructions is not None:
        conversation.messages.append({"role": "system", "content": instructions})
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        instead = "it is missing" if given is None else f"found {given!r:.60}"
        raise Refused(f"input should be a text, or a list of one item or more; {instead}", FIELD)
    for number, item in enumerate(items):
        conversation.add(item, f"item {number} of input")
    return conversation.messages


class _Conversation:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._thought = ""
        """Thinking that belongs to the assistant's next message."""

    def add(self, item: Any, name: str) -> None:
        """Add an item. name: for error messages. Raises Refused."""
        if not isinstance(item, dict):
            raise Refused(f"{name} should be an object, found {item!r:.60}", FIELD)
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, name)
        elif kind == "function_call":
            self._add_call(item, name)
        elif kind == "function_call_output":
            content = _text(item.get("output"), f"the output of {name}")
            call = _word(item, "call_id", name)
            self.messages.append({"role": "tool", "tool_call_id": call, "content": content})
        elif kind == "reasoning":
            self._thought += _thinking(item, name)
        else:
            raise Refused(
                f"{name} has the type {kind!r:.60}; supported are message, function_call, "
                "function_call_output and reasoning",
                FIELD,
            )

    def _add_message(self, item: Mapping[str, Any], name: str) -> None:
        role, where = item.get("role"), f"the content of {name}"
        if role not in _ROLES:
            raise Refused(f"the role of {name} should be one of {', '.join(_ROLES)}", FIELD)
        if role == "user":
            shown = _with_images(item.get("content"), where)
            self.messages.append({"role": role, "content": shown, **self._thinking_of(role)})
            return
        content = _text(item.get("content"), where)
        first = self.messages[0] if len(self.messages) == 1 else {}
        if role in _SYSTEM and first.get("role") == "system":
            first["content"] += f"\n\n{content}"
        elif role == "assistant" and self._waits_for_results:
            self._continue(content)
        else:
            self.messages.append({"role": role, "content": content, **self._thinking_of(role)})

    def _add_call(self, item: Mapping[str, Any], name: str) -> None:
        """Add a call to the assistant's message before it; without one, to a message without text."""
        function = {key: _word(item, key, name) for key in ("name", "arguments")}
        call = {"id": _word(item, "call_id", name), "type": "function", "function": function}
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        self._continue("")
        self.messages[-1].setdefault("tool_calls", []).append(call)

    @property
    def _waits_for_results(self) -> bool:
        """True if the last message has calls: items of the same answer may follow them, and their results come last."""
        return bool(self.messages) and "tool_calls" in self.messages[-1]

    def _continue(self, content: str) -> None:
        """Add a text, and the thinking before it, to the assistant's last message."""
        message = self.messages[-1]
        message["content"] += content
        for key, thought in self._thinking_of("assistant").items():
            message[key] = message.get(key, "") + thought

    def _thinking_of(self, role: str) -> dict[str, str]:
        thought, self._thought = self._thought, ""
        return {REASONING: thought} if thought and role == "assistant" else {}


def _thinking(item: Mapping[str, Any], name: str) -> str:
    """Return the text of a reasoning item; "" if the item has none, as with other servers' encrypted thinking."""
    content, summary = item.get("content") or [], item.get("summary") or []
    return _text(content or summary, f"the content of {name}")


def _text(value: Any, name: str) -> str:
    """Return a text, or the texts of the parts of a content, joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise Refused(f"{name} should be a text or a list of parts, found {value!r:.60}", FIELD)
    return "".join(_part(part, name) for part in value)


def _with_images(value: Any, name: str) -> str | list[dict[str, Any]]:
    """Return a text, or the parts of a chat's message if there is an image among them."""
    images = isinstance(value, list) and any(map(_is_image, value))
    if not images:
        return _text(value, name)
    return [
        {"type": "image", "image": read_image_url(part.get("image_url"), name)}
        if _is_image(part)
        else {"type": "text", "text": _part(part, name)}
        for part in value
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _part(part: Any, name: str) -> str:
    text = None
    if isinstance(part, dict):
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
    if isinstance(text, str):
        return text
    found = part.get("type") if isinstance(part, dict) else part
    raise Refused(f"{name} should have parts with a text, found {found!r:.60}", FIELD)


def _word(item: Mapping[str, Any], key: str, name: str) -> str:
    word = item.get(key)
    if not isinstance(word, str):
        raise Refused(f"{name} needs the text {key}, found {word!r:.60}", FIELD)
    return word
