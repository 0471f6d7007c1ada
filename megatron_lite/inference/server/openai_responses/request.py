"""Requests of /v1/responses, as requests of a chat. Every field is supported or refused."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server.as_chat import SHARED, as_chat, read_tools
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_requests import Wanted
from megatron_lite.inference.server.openai_responses.answer import ResponseForm
from megatron_lite.inference.server.openai_responses.conversation import read_input
from megatron_lite.inference.server.openai_responses.fields import (
    as_function,
    read_effort,
    read_format,
    read_likeliest,
    read_tool_choice,
)

_SHARED = (*SHARED, "stop", "chat_template_kwargs", "parallel_tool_calls")
_ONLY: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
    "context_management": (),
    "moderation": (),
}
_DEEPEST = 200
"""Number of levels of a field that the answer repeats. Python writes less than a thousand."""
_HARMLESS = ("max_tool_calls", "prompt_cache_options")
"""Fields that are accepted without effect, beside those of a chat."""
_NAMES = {
    "messages": "input",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Fields of a chat -> fields of a response."""


def read_response(fields: Fields, opened: Opened, name: str) -> tuple[Wanted, ResponseForm]:
    """Read a request. Raises Refused."""
    if "previous_response_id" in fields:
        raise Refused(
            "this server stores no responses: leave out previous_response_id, and send the whole conversation in input",
            "previous_response_id",
            "unsupported",
        )
    repeated = {
        "instructions": _instructions(fields.any("instructions")),
        "max_output_tokens": fields.integer("max_output_tokens", None, 1, opened.model.length),
        "text": fields.any("text"),
        "tools": fields.any("tools"),
        "tool_choice": fields.any("tool_choice"),
    }
    for field, value in repeated.items():
        _require_repeatable(field, value)
    asked = _chat_fields(fields, repeated)
    _finish(fields)
    wanted = as_chat(asked, opened, name, _NAMES)
    form = ResponseForm(
        model=wanted.model,
        detokenize=opened.tokenizer.detokenize,
        log_probs=wanted.log_probs is not None,
        prompt_tokens=wanted.prompt_tokens,
        echoed=_echoed(repeated, asked, wanted),
    )
    return wanted, form


def _chat_fields(fields: Fields, repeated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat."""
    likeliest = read_likeliest(fields)
    return {key: fields.any(key) for key in _SHARED} | {
        "messages": read_input(fields.any("input"), repeated["instructions"]),
        "tools": read_tools(repeated["tools"], as_function),
        "tool_choice": read_tool_choice(repeated["tool_choice"]),
        "max_completion_tokens": repeated["max_output_tokens"],
        "response_format": read_format(repeated["text"]),
        "reasoning_effort": read_effort(fields.any("reasoning")),
        "logprobs": likeliest is not None,
        "top_logprobs": likeliest,
    }


def _echoed(
    repeated: Mapping[str, Any], asked: Mapping[str, Any], wanted: Wanted
) -> dict[str, Any]:
    """Return the fields of the answer that say what was asked."""
    return {
        **repeated,
        "text": repeated["text"] or {"format": {"type": "text"}},
        "tools": repeated["tools"] or [],
        "tool_choice": repeated["tool_choice"] or "auto",
        "parallel_tool_calls": asked["parallel_tool_calls"] is not False,
        "reasoning": {"effort": asked["reasoning_effort"], "summary": None},
        "temperature": wanted.sampling.temperature,
        "top_logprobs": asked["top_logprobs"] or 0,
        "top_p": wanted.sampling.top_p,
    }


def _require_repeatable(field: str, value: Any) -> None:
    """Raise Refused if the answer can't repeat a value as JSON."""
    level = [value]
    for _ in range(_DEEPEST):
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            raise Refused(f"{field} has NaN or an infinite number, which JSON does not have", field)
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return
    raise Refused(f"{field} has more than {_DEEPEST} levels of lists and objects", field)


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _instructions(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise Refused(f"instructions should be a text, found {value!r:.60}", "instructions")


def _finish(fields: Fields) -> None:
    """Check the fields that were not read. Raises Refused."""
    options = fields.any("stream_options")
    # Nothing is ever added to hide the lengths of texts.
    is_known = isinstance(options, dict) and set(options) <= {"include_obfuscation"}
    if options is not None and not is_known:
        raise Refused(
            f"stream_options supports only include_obfuscation, found {options!r:.60}",
            "stream_options",
        )
    fields.only(_ONLY)
    for harmless in _HARMLESS:
        fields.any(harmless)
    fields.finish()
