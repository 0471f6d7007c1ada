"""Requests of /v1/responses, as requests of a chat. Every field is supported or refused."""

from collections.abc import Mapping
from typing import Any

from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_requests import Wanted, chat
from megatron_lite.inference.server.openai_responses.answer import ResponseForm
from megatron_lite.inference.server.openai_responses.conversation import read_input
from megatron_lite.inference.server.openai_responses.fields import (
    read_effort,
    read_format,
    read_likeliest,
    read_tool_choice,
    read_tools,
)

_SHARED = (
    "model", "temperature", "top_p", "top_k", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "chat_template_kwargs", "parallel_tool_calls", "stream",
)  # fmt: skip
"""Fields that mean the same in a chat. Some of them are not OpenAI's."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "conversation": (),
    "prompt": (),
    "context_management": (),
    "moderation": (),
}
_HARMLESS = ("max_tool_calls", "prompt_cache_options")
"""Fields that are accepted without effect, beside those of a chat."""
_NAMES = {
    "messages": "input",
    "prompt": "input",
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
    tools, choice = fields.any("tools"), fields.any("tool_choice")
    text, effort = fields.any("text"), read_effort(fields.any("reasoning"))
    instructions = _instructions(fields.any("instructions"))
    most_tokens = fields.integer("max_output_tokens", None, 1, opened.model.length)
    likeliest = read_likeliest(fields)
    asked = {name: fields.any(name) for name in _SHARED} | {
        "messages": read_input(fields.any("input"), instructions),
        "tools": read_tools(tools),
        "tool_choice": read_tool_choice(choice),
        "max_completion_tokens": most_tokens,
        "response_format": read_format(text),
        "reasoning_effort": effort,
        "logprobs": likeliest is not None,
        "top_logprobs": likeliest,
    }
    _finish(fields)
    wanted = _as_chat(asked, opened, name)
    echoed = {
        "instructions": instructions,
        "max_output_tokens": most_tokens,
        "parallel_tool_calls": asked["parallel_tool_calls"] is not False,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": wanted.sampling.temperature,
        "text": text or {"format": {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": tools or [],
        "top_logprobs": likeliest or 0,
        "top_p": wanted.sampling.top_p,
    }
    return wanted, _form(wanted, opened, echoed)


def _form(wanted: Wanted, opened: Opened, echoed: Mapping[str, Any]) -> ResponseForm:
    return ResponseForm(
        model=wanted.model,
        detokenize=opened.tokenizer.detokenize,
        log_probs=wanted.log_probs is not None,
        prompt_tokens=wanted.prompt_tokens,
        echoed=echoed,
    )


def _instructions(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise Refused(f"instructions should be a text, found {value!r:.60}", "instructions")


def _finish(fields: Fields) -> None:
    """Check the fields that were not read. Raises Refused."""
    options = fields.any("stream_options")
    if options is not None:
        found = options if isinstance(options, dict) else {"stream_options": options}
        unknown = Fields(found)
        unknown.any("include_obfuscation")  # nothing is ever added to hide the lengths of texts
        unknown.finish()
    fields.only(_ONLY)
    for harmless in _HARMLESS:
        fields.any(harmless)
    fields.finish()


def _as_chat(asked: Mapping[str, Any], opened: Opened, name: str) -> Wanted:
    """Read a request as a chat's. A refusal names the field of the response. Raises Refused."""
    try:
        return chat(Fields(asked), opened, name)
    except Refused as refused:
        if refused.field is not None:
            refused.field = _NAMES.get(refused.field, refused.field)
        raise
