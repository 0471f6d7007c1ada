"""Texts of messages as lists of parts, for chat templates of multimodal models that read nothing else (LLaVA's)."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_PROBE = "a text to look for"


def with_parts(messages: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """Return the messages, their texts as parts if the template leaves out a content that is a text."""
    if not _reads_parts_alone(template):
        return list(messages)
    return [{**message, "content": _parts(message.get("content"))} for message in messages]


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@lru_cache
def _reads_parts_alone(template: str) -> bool:
    """Return whether the template writes a text only if it is a part."""
    if "content" not in template:
        return False
    return not _writes(_PROBE, template) and _writes(_parts(_PROBE), template)


def _writes(content: Any, template: str) -> bool:
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [{"role": "user", "content": content}]
    try:
        rendered = render_jinja_template(conversations=[conversation], chat_template=template)
    except (
        Exception
    ):  # a template's code may raise any error, and says more about a real conversation
        return False
    return _PROBE in rendered[0][0]
