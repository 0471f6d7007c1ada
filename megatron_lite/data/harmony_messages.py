"""Messages of OpenAI's protocol, as the chat template of GPT-OSS expects them.

The template has rules that the protocol doesn't have. It reads thinking from the field `thinking`. It takes one call a
message, and takes a message's thinking or its content beside a call, not both. It names a tool's result after the last
call, and writes the result as JSON. It reads instructions only from the first message.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_lite.data.harmony import is_harmony_template
from megatron_lite.data.thinking_fields import FIELDS

_INSTRUCTIONS = ("system", "developer")


def with_harmony_fields(
    messages: Sequence[Mapping[str, Any]], template: str
) -> list[Mapping[str, Any]]:
    """Return the messages for a template of GPT-OSS; for another template, the same messages.

    Raises ValueError for instructions behind the first message, which the template would leave out.
    """
    if not is_harmony_template(template) or "reasoning_content" in template:
        return list(messages)
    return list(_with_own_results(_with_one_instruction(messages)))


def with_descriptions(tools: Sequence[Any], template: str) -> list[Any]:
    """Return the tools for a template of GPT-OSS, which fails for a tool without a description."""
    if not is_harmony_template(template):
        return list(tools)
    return [_described(tool) for tool in tools]


def _described(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _with_one_instruction(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the instructions at the beginning as one message."""
    count = 0
    while count < len(messages) and messages[count].get("role") in _INSTRUCTIONS:
        count += 1
    rest = messages[count:]
    for number, message in enumerate(rest, count + 1):
        if message.get("role") in _INSTRUCTIONS:
            raise ValueError(
                f"message {number} is by the {message['role']}; this template reads instructions only at the beginning"
            )
    if count < 2:
        return list(messages)
    texts = [str(message.get("content") or "") for message in messages[:count]]
    joined = "\n\n".join(text for text in texts if text)
    return [{**messages[0], "content": joined}, *rest]


def _with_own_results(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the messages, each call in a message of its own with its results behind it."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message.get("role") != "assistant":
            yield _result(message)
            continue
        calls = list(message.get("tool_calls") or ())
        answers = _one_call_each(_with_thinking(message), calls)
        if len(answers) == 1:
            yield answers[0]
            continue
        results = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        yield from _paired(answers, results)


def _paired(
    answers: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Yield each call with its results. Results without the id of a call belong to the calls in their order."""
    left = list(results)
    named = {_id(answer) for answer in answers}
    for answer in answers:
        yield answer
        own = [result for result in left if result.get("tool_call_id") == _id(answer)]
        if not own or _id(answer) is None:
            own = [result for result in left if result.get("tool_call_id") not in named - {None}][
                :1
            ]
        for result in own:
            left.remove(result)
            yield _result(result)
    yield from map(_result, left)


def _id(answer: Mapping[str, Any]) -> Any:
    call = answer["tool_calls"][0]
    return call.get("id") if isinstance(call, Mapping) else None


def _one_call_each(message: Mapping[str, Any], calls: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return a message for each call. The first one has the thinking."""
    if not calls:
        # The template takes even an empty list for a call.
        return [{key: value for key, value in message.items() if key != "tool_calls"}]
    thoughts = [str(message.get(name) or "") for name in ("thinking", "content")]
    thinking = "\n\n".join(text for text in thoughts if text)
    first = {**message, "content": "", "tool_calls": [calls[0]]}
    first.pop("thinking", None)
    if thinking:
        first["thinking"] = thinking
    others = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
    return [first, *others]


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its thinking in the field that the template reads."""
    found = [message.get(name) for name in ("thinking", *FIELDS)]
    thinking = next((text for text in found if text), None)
    dropped = ("thinking", *FIELDS)
    rest = {key: value for key, value in message.items() if key not in dropped}
    return rest if thinking is None else {**rest, "thinking": thinking}


def _result(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool's message with JSON as a value, which the template writes as JSON again."""
    content = message.get("content")
    if message.get("role") != "tool" or not isinstance(content, str):
        return message
    try:
        return {**message, "content": json.loads(content)}
    except (ValueError, RecursionError):
        return message
