"""Requests of /v1/messages, as requests of a chat. Every field is supported or refused."""

import sys
from dataclasses import replace
from typing import Any

from megatron_lite.inference.opening import Opened
from megatron_lite.inference.server.anthropic_messages.answer import MessageForm
from megatron_lite.inference.server.anthropic_messages.conversation import read_conversation
from megatron_lite.inference.server.anthropic_messages.errors import NO_THREADS
from megatron_lite.inference.server.anthropic_messages.fields import (
    as_function,
    read_output_config,
    read_thinking,
    read_tool_choice,
)
from megatron_lite.inference.server.as_chat import SHARED, as_chat, read_tools
from megatron_lite.inference.server.errors import NoRoom, Refused
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_requests import Wanted
from megatron_lite.inference.server.template_variables import FIELD, switch_of_thinking

_NAMES = {
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "stop": "stop_sequences",
}
"""Fields of a chat -> fields of a message."""


def read_message(fields: Fields, opened: Opened, name: str) -> tuple[Wanted, MessageForm]:
    """Read a request. Raises Refused.

    An answer has as many tokens as fit, and at most `max_tokens`: clients have to send it, and don't know the model's length.
    """
    most_tokens = fields.integer("max_tokens", None, 1, sys.maxsize)
    if most_tokens is None:
        raise Refused("max_tokens is missing", "max_tokens")
    wanted = _wanted(fields, opened, name)
    wanted = replace(wanted, max_tokens=min(most_tokens, wanted.max_tokens))
    return wanted, MessageForm(wanted.model, wanted.prompt_tokens)


def count_tokens(fields: Fields, opened: Opened, name: str) -> dict[str, int]:
    """Answer a request of /v1/messages/count_tokens. Raises Refused."""
    fields.any("max_tokens")
    opened = replace(opened, images=opened.images.measuring())
    try:
        count = _wanted(fields, opened, name).prompt_tokens
    except NoRoom as refused:  # clients count to learn how much of a conversation fits
        count = refused.prompt_tokens
    return {"input_tokens": count}


def _wanted(fields: Fields, opened: Opened, name: str) -> Wanted:
    if "thread" in fields:
        raise Refused(
            "this server stores no conversations: leave out thread, and send the whole conversation in messages",
            "thread",
            NO_THREADS,
        )
    choice = read_tool_choice(fields.any("tool_choice"))
    output = read_output_config(fields.any("output_config"))
    asked = {key: fields.any(key) for key in SHARED} | {
        "messages": read_conversation(fields.any("messages"), fields.any("system")),
        "stop": fields.any("stop_sequences"),
        "tools": read_tools(fields.any("tools"), as_function),
        "tool_choice": choice.choice,
        "parallel_tool_calls": choice.parallel,
        "response_format": output.form,
        "reasoning_effort": output.effort,
        FIELD: _variables(fields, opened),
    }
    fields.any("cache_control")  # without effect: rows that begin alike are always kept
    fields.finish()
    return as_chat(asked, opened, name, _NAMES)


def _variables(fields: Fields, opened: Opened) -> Any:
    """Return the variables of the template, with the one that switches thinking on or off, if it has one."""
    variables, thinks = fields.any(FIELD) or {}, read_thinking(fields.any("thinking"))
    switch = switch_of_thinking(opened.tokenizer)
    if thinks is None or switch is None or not isinstance(variables, dict):
        return variables  # the chat refuses what is no object
    return {switch: thinks, **variables}
