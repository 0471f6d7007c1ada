"""The images of a chat: parts of its messages, or a field `images` beside them.

| by | message | field |
|---|---|---|
| OpenAI | a part {"type": "image_url", "image_url": {"url": ...}} | |
| Qwen | a part {"type": "image", "image": ...} | |
| TRL | a part {"type": "image"}, or no part: the images come before the first text of the user | `images` |
| ShareGPT, LLaVA | `<image>` in the text | `images` or `image` |
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from formats.wording import counted
from megatron_lite.data.encoding import BadRecord
from megatron_lite.data.finetuning.forms import IMAGES, Chat, Message

PLACE = "<image>"
"""Stands for an image in a text."""
_OTHER_MEDIA = ("videos", "video", "audios", "audio")
"""Fields of records beside their images."""
Part = Mapping[str, Any]


def with_images(chat: Chat, record: Mapping[str, Any]) -> Chat:
    """Return the chat with its images, and with a part {"type": "image"} in the place of each. Raises BadRecord.

    Messages with images have a list of parts as content.
    """
    refuse_videos_and_sounds(record)
    listed = _listed(record)
    messages = [_split(message) if listed else message for message in chat.messages]
    if listed and not any(_images_of(message) for message in messages):
        messages = _with_images_first(messages, len(listed))
    _refuse_unused_places(messages)
    waiting = iter(listed)
    images = [_found(part, waiting) for message in messages for part in _images_of(message)]
    unused = len(list(waiting))
    if unused:
        raise BadRecord(
            f"has {counted(len(listed), 'image')}, and {unused} more than places for them in its messages"
        )
    return replace(
        chat, messages=[_without_sources(message) for message in messages], images=images
    )


def lists_images(record: Mapping[str, Any]) -> bool:
    """Return whether a record has a field of images that is not empty."""
    return any(record.get(name) for name in IMAGES)


def has_place(messages: Sequence[Message]) -> bool:
    """Return whether a text has the place of an image."""
    return any(PLACE in text for message in messages for text in _texts_of(message))


def refuse_videos_and_sounds(record: Mapping[str, Any]) -> None:
    """Raise BadRecord for a record with a field of videos or sounds, which would be left out."""
    for name in _OTHER_MEDIA:
        if record.get(name):
            raise BadRecord(f'has "{name}", which a run can\'t train on; it reads images alone')


def _listed(record: Mapping[str, Any]) -> Sequence[Any]:
    """Return the images in the record's own field. Raises BadRecord if both fields have some."""
    given = [(name, record[name]) for name in IMAGES if record.get(name) not in (None, "", [])]
    if len(given) > 1:
        raise BadRecord('has "images" and "image"; expected one of them')
    for _, images in given:
        return images if isinstance(images, list) else [images]
    return []


def _refuse_unused_places(messages: Sequence[Message]) -> None:
    """Raise BadRecord for a place of an image in a text that is not split, because no image is there.

    An answer may be about anything.
    """
    for message in messages:
        if message["role"] != "assistant" and any(PLACE in text for text in _texts_of(message)):
            raise BadRecord(
                f'has {PLACE} in a text, and no image for it; expected a field "images", or a text without {PLACE}'
            )


def _texts_of(message: Message) -> list[str]:
    content = message["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def _split(message: Message) -> Message:
    """Return the message with parts in place of a text that has places of images."""
    content = message["content"]
    if not isinstance(content, str) or PLACE not in content:
        return message
    first, *others = content.split(PLACE)
    parts = _text(first)
    for text in others:
        parts += [{"type": "image"}, *_text(text)]
    return {**message, "content": parts}


def _text(text: str) -> list[Part]:
    return [{"type": "text", "text": text}] if text else []


def _with_images_first(messages: Sequence[Message], count: int) -> list[Message]:
    """Return the messages with images before the first text of the user."""
    asked = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
    if asked is None:
        raise BadRecord("has images, but no message of the user where they could be")
    message = messages[asked]
    images = [{"type": "image"} for _ in range(count)]
    changed = {**message, "content": [*images, *_text(message["content"])]}
    return [*messages[:asked], changed, *messages[asked + 1 :]]


def _images_of(message: Message) -> list[Part]:
    content = message["content"]
    return [] if isinstance(content, str) else [p for p in content if p["type"] == "image"]


def _found(part: Part, waiting: Iterator[Any]) -> Any:
    """Return the image of a part: its own, or the next one of the record's field."""
    given = part.get("image")
    if given is None:
        given = next(waiting, None)
    if given is None:
        raise BadRecord(
            f'has more places for images in its messages than images; a place is {PLACE} in a text, or a part without "image", '
            '"image_url", "path" or "url"'
        )
    return given


def _without_sources(message: Message) -> Message:
    """Return the message with {"type": "image"} for each image. Chat templates expect no more."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {
        **message,
        "content": [{"type": "image"} if p["type"] == "image" else p for p in content],
    }
