"""Requests of other routes, as requests of a chat."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_requests import Wanted, chat

SHARED = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias",
)  # fmt: skip
"""Fields that mean the same in all routes. Some of them belong to no protocol."""


def as_chat(
    asked: Mapping[str, Any], opened: Opened, name: str, names: Mapping[str, str]
) -> Wanted:
    """Read a request that has a chat's fields. Raises Refused.

    names: a chat's field -> the client's, which a refusal names.
    """
    try:
        return chat(Fields(asked), opened, name)
    except Refused as refused:
        if refused.field is not None:
            refused.field = names.get(refused.field, refused.field)
        raise


def read_tools(described: Any, as_function: Callable[[Any, int], dict[str, Any]]) -> list[Any]:
    """Return tools in the form of a chat, in which a function is an object of its own. Raises Refused.

    as_function: (tool, its number) -> the function.
    """
    if described is None:
        return []
    if not isinstance(described, list):
        raise Refused(f"tools should be a list, found {described!r:.60}", "tools")
    functions = (as_function(tool, number) for number, tool in enumerate(described))
    return [{"type": "function", "function": function} for function in functions]
