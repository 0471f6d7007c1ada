"""Fields of /v1/responses that a chat has in another form: tools, the form of the answer, thinking, log-probabilities."""

from collections.abc import Mapping
from typing import Any

from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_requests import MOST_ALTERNATIVES

_LOG_PROBS = "message.output_text.logprobs"
_INCLUDED = (_LOG_PROBS, "reasoning.encrypted_content")
"""Values of `include`. Thinking is never encrypted, so the second one has no effect."""


def as_function(tool: Any, number: int) -> dict[str, Any]:
    """Return the function of a tool, as a chat has it. Raises Refused."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function" or not isinstance(tool.get("name"), str):
        raise Refused(
            f"tool {number} should have the type function and a name, found {tool!r:.80}", "tools"
        )
    known = ("name", "description", "parameters", "strict")
    return {key: tool[key] for key in known if key in tool}


def read_tool_choice(choice: Any) -> Any:
    """Return a choice in the form of a chat. The chat refuses an unknown one."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return _named(choice)
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_named(each) for each in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {**choice, "tools": tools}}
    return choice


def _named(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    return {"type": "function", "function": {"name": tool.get("name")}}


def read_format(text: Any) -> Mapping[str, Any] | None:
    """Return the form in `text`, as the chat's `response_format`. Raises Refused."""
    if text is None:
        return None
    if not isinstance(text, dict):
        raise Refused(f"text should be an object with a format, found {text!r:.60}", "text")
    inner = Fields(text)
    inner.only({"verbosity": ("medium",)})
    form = inner.any("format")
    inner.finish()
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return None if form is None else form


def read_effort(reasoning: Any) -> str | None:
    """Return the `effort` in `reasoning`. Its summary has no effect: thinking comes whole. Raises Refused."""
    if reasoning is None:
        return None
    if not isinstance(reasoning, dict):
        raise Refused(
            f"reasoning should be an object with an effort, found {reasoning!r:.60}", "reasoning"
        )
    inner = Fields(reasoning)
    effort: str | None = inner.any("effort")
    for harmless in ("summary", "generate_summary"):
        inner.any(harmless)
    inner.finish()
    return effort


def read_likeliest(fields: Fields) -> int | None:
    """Return the number of likeliest tokens to list for each token; None if log-probabilities are not wanted.

    Reads `include` and `top_logprobs`. Raises Refused.
    """
    included = fields.any("include") or []
    count: int | None = fields.integer("top_logprobs", None, 0, MOST_ALTERNATIVES)
    if not isinstance(included, list) or any(each not in _INCLUDED for each in included):
        raise Refused(
            f"include should be a list of {' and '.join(_INCLUDED)}, found {included!r:.80}",
            "include",
        )
    if _LOG_PROBS in included:
        return count or 0
    if count:
        raise Refused(f"top_logprobs needs {_LOG_PROBS} in include", "top_logprobs")
    return None
