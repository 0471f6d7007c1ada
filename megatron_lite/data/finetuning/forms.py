"""The forms of a finetuning record: one line of a table for each form, with the meaning of its fields.

| form | fields | by |
|---|---|---|
| messages | `messages` of {role, content}; `tools` | OpenAI |
| conversations | `conversations` of {from, value}; `system`, `tools` | ShareGPT |
| alpaca | `instruction`, `output`; `input`, `system` | Stanford Alpaca |
| prompt | `prompt` and `completion`, or `input` and `output` | |
| text | `text` | |

Messages and conversations may have images (record_images.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.tool_calls import with_parsed_arguments

Message = Mapping[str, Any]
"""A message for chat templates: role, content, and further fields."""


@dataclass(frozen=True)
class Plain:
    """Text that is tokenized unchanged: `given` is not learned, `learned` is."""

    given: str
    learned: str


@dataclass(frozen=True)
class Chat:
    """A conversation for the tokenizer's chat template. The assistant's turns are learned."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    given: int = 0
    """Number of first messages that are not learned, whichever role wrote them."""
    plain: Plain | None = None
    """The same example as plain text, for a tokenizer without a template; None if the form has no plain text."""
    images: Sequence[Any] = ()
    """The images as the record names them, in the order of their places in the messages."""


@dataclass(frozen=True)
class Form:
    """A form. A record has it if the record has all of `fields`."""

    name: str
    fields: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Chat | Plain]
    """Reads a record without its null fields. Raises BadRecord."""


ROLES = {
    "system": "system", "developer": "developer", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "model": "assistant", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""Role names in datasets -> role names in chat templates."""


def _messages(record: Mapping[str, Any]) -> Chat:
    return Chat(read_turns(record, "messages", images=True), read_tools(record))


def _conversations(record: Mapping[str, Any]) -> Chat:
    turns = read_turns(record, "conversations", images=True)
    return Chat([*read_system(record), *turns], read_tools(record))


def _alpaca(record: Mapping[str, Any]) -> Chat:
    asked = read_text(record, "instruction")
    more = read_text(record, "input")
    answer = read_text(record, "output")
    question = f"{asked}\n\n{more}" if more else asked
    turns = [
        *read_system(record),
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    parts = [
        read_text(record, "system"),
        f"### Instruction:\n{asked}",
        f"### Input:\n{more}" if more else "",
    ]
    return Chat(
        turns,
        plain=Plain("\n\n".join(part for part in (*parts, "### Response:\n") if part), answer),
    )


def _prompt(record: Mapping[str, Any]) -> Plain:
    return Plain(read_text(record, "prompt"), read_text(record, "completion"))


def _input(record: Mapping[str, Any]) -> Plain:
    return Plain(read_text(record, "input"), read_text(record, "output"))


def _whole(record: Mapping[str, Any]) -> Plain:
    return Plain("", read_text(record, "text"))


FORMS = (
    Form("messages", ("messages",), ("tools",), _messages),
    Form("conversations", ("conversations",), ("system", "tools"), _conversations),
    Form("alpaca", ("instruction", "output"), ("input", "system"), _alpaca),
    Form("prompt", ("prompt", "completion"), (), _prompt),
    Form("prompt", ("input", "output"), (), _input),
    Form("text", ("text",), (), _whole),
)
"""If a form has all fields of another form, it comes first."""

OTHER_CONTENT = ("chosen", "rejected", "history")
"""Fields with text in forms that finetuning does not read."""

CONTENT = {name for form in FORMS for name in (*form.fields, *form.optional)} | set(OTHER_CONTENT)

NAMES = tuple(dict.fromkeys(form.name for form in FORMS))


IMAGES = ("images", "image")
"""Fields with images, which are read if the model reads images."""
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Fields by which qwen-vl-utils scales a single image."""


@dataclass(frozen=True)
class Reading:
    """A record that was read."""

    example: Chat | Plain
    unread: frozenset[str]
    """Fields that are not content, such as `id`, `source`."""


def read_record(record: Mapping[str, Any], wanted: str | None = None) -> Reading:
    """Read a record. wanted: the form to read if records have the fields of several; other forms are then ignored.

    Messages may have parts for images; see record_images.py.
    Raises BadRecord for a record without a form, and for content that would be left out.
    """
    present = {name: value for name, value in record.items() if value is not None}
    form = _form_of(present, wanted)
    used = {*form.fields, *form.optional}
    if wanted is None:
        _refuse_unused(present, form, CONTENT - used)
    unread = frozenset(present.keys() - used)
    return Reading(form.read(present), unread)


def _refuse_unused(present: Mapping[str, Any], form: Form, unused: Set[str]) -> None:
    """Raise BadRecord for a record with content in an unused field."""
    left_out = [name for name in present if name in unused and present[name] not in ("", [])]
    if left_out:
        raise BadRecord(
            f"has {listed(form.fields)}, and {listed(left_out)}, which would be left out; take away what is not meant, "
            f"or name the form that is: --finetune-form {' | '.join(NAMES)}"
        )


def _form_of(record: Mapping[str, Any], wanted: str | None) -> Form:
    candidates = [form for form in FORMS if wanted in (None, form.name)]
    for form in candidates:
        if all(name in record for name in form.fields):
            return form
    if "chosen" in record and "rejected" in record:
        raise BadRecord(
            "is a pair of a chosen and a rejected answer; --dpo learns from pairs, and so do --kto and --reward-modeling"
        )
    forms = "; ".join(dict.fromkeys(listed(form.fields) for form in candidates))
    raise BadRecord(
        f"has {listed(record) or 'no fields'}, but not the fields of an example: {forms}"
    )


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the names in double quotes, separated by commas."""
    return ", ".join(f'"{name}"' for name in names)


def read_text(record: Mapping[str, Any], name: str) -> str:
    """Return a text field; "" if it is missing. Raises BadRecord for a field that is not text."""
    value = record.get(name, "")
    if not isinstance(value, str):
        raise BadRecord(f'its "{name}" should be text, found {type(value).__name__}')
    return value


def read_system(record: Mapping[str, Any]) -> list[Message]:
    """Return the field `system` as a list of at most one message."""
    text = read_text(record, "system")
    return [{"role": "system", "content": text}] if text else []


def read_tools(record: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the field `tools`, which may be JSON text; None if it is missing or empty. Raises BadRecord."""
    tools = record.get("tools") or None
    if isinstance(tools, str):  # tables store it as text
        try:
            tools = json.loads(tools) or None
        except (ValueError, RecursionError) as error:
            raise BadRecord(f'its "tools" are not JSON: {error}') from error
    if tools is not None and not isinstance(tools, list):
        raise BadRecord('its "tools" should be a list')
    return tools


def read_turns(record: Mapping[str, Any], name: str, *, images: bool = False) -> list[Message]:
    """Return the messages in a field. images: whether they may have images. Raises BadRecord."""
    turns = record[name]
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f'its "{name}" should be a list of messages')
    return [
        read_message(turn, f'message {number} of its "{name}"', images=images)
        for number, turn in enumerate(turns, 1)
    ]


def read_message(turn: Any, where: str, *, images: bool = False) -> Message:
    """Read {role, content}, or ShareGPT's {from, value}, in any form. With an image, the content is a list of parts."""
    if not isinstance(turn, Mapping):
        raise BadRecord(f"{where} should be an object")
    rest = {key: value for key, value in turn.items() if value is not None}
    role = rest.pop("role" if "role" in rest else "from", None)
    content = rest.pop("content" if "content" in rest else "value", None)
    if not isinstance(role, str) or role not in ROLES:
        raise BadRecord(f"{where} is by {role!r}; there are {', '.join(ROLES)}")
    if content is None and not rest:
        raise BadRecord(f'{where} has no "content"')
    for name in ("weight", "train"):
        if rest.pop(name, 1) not in (1, True):
            raise BadRecord(
                f"{where} has a loss weight, which is not supported; end the conversation before it"
            )
    if isinstance(content, list):
        content = _parts(content, where, images=images)
    if content is not None and not isinstance(content, str | list):
        kind = type(content).__name__
        raise BadRecord(f"{where} should have text for its content, found {kind}")
    # A message of tool calls alone may have no content. Templates that join it with other text need one, as in the server.
    message: dict[str, Any] = {"role": ROLES[role], "content": content or ""}
    message.update(with_parsed_arguments(rest))
    return message


def _parts(content: Sequence[Any], where: str, *, images: bool) -> str | list[Any]:
    """Return the text of a content list, or its parts if there are images. Raises BadRecord for other parts."""
    parts = [_part(part, where, images=images) for part in content]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: Any, where: str, *, images: bool) -> Mapping[str, Any]:
    """Return {type: text, text} or {type: image, image}, whose image may be None. Raises BadRecord."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in (None, "text") and isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if not images or kind not in ("image", "image_url"):
        expected = "text or an image" if images else "text"
        raise BadRecord(f"{where} has content that is not {expected}")
    for name in _SIZES:
        if part.get(name) is not None:
            raise BadRecord(
                f'{where} has an image with its own "{name}", which is not read; set the limits of all images in preprocessor_config.json'
            )
    sources = (part.get(name) for name in ("image", "image_url", "path", "url"))
    return {"type": "image", "image": next(filter(None, sources), None)}
