"""The role `developer` of messages, which most chat templates don't know."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_DEVELOPER = re.compile(r"\bdeveloper\b")


def with_known_roles(
    messages: Sequence[Mapping[str, Any]], template: str
) -> list[Mapping[str, Any]]:
    """Return the messages, those of a developer as the system's, unless the template reads the role `developer`.

    Most templates leave out a message whose role they don't know.
    """
    if _DEVELOPER.search(template):
        return list(messages)
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message
        for message in messages
    ]
