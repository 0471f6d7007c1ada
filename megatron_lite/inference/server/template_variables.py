"""Variables of the chat template that a chat request sets, such as `enable_thinking` of Qwen 3."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from megatron_lite.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megatron_lite.inference.prompts import template_for_tools
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.fields import Fields

FIELD = "chat_template_kwargs"
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch thinking on and off."""


def read_variables(fields: Fields, tokenizer: Tokenizer, tools: Sequence[Any]) -> dict[str, Any]:
    """Read `chat_template_kwargs`, as vLLM has it, and `reasoning_effort`, a variable of GPT-OSS' template.

    tools: those that the template gets. Raises Refused for a variable that the template doesn't read.
    """
    variables = fields.any(FIELD) or {}
    if not isinstance(variables, dict):
        raise Refused(f"{FIELD} should be an object of variables, found {variables!r:.60}", FIELD)
    effort = fields.any("reasoning_effort")
    if effort is not None:
        variables = {"reasoning_effort": effort, **variables}
    if variables and isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.inner.chat_template:
        _check(variables, tokenizer.inner, tools)
    return variables


def switch_of_thinking(tokenizer: Tokenizer) -> str | None:
    """Return the variable of the chat template that switches thinking on and off; None if it has none."""
    template = template_for_tools(tokenizer)
    return next((name for name in _SWITCHES if _reads(template, name)), None)


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _check(variables: dict[str, Any], tokenizer: Any, tools: Sequence[Any]) -> None:
    # A parameter of this function, such as chat_template, would replace what the server passes.
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    template = tokenizer.get_chat_template(None, list(tools) or None)
    for name in variables:
        if name in taken:
            raise Refused(f"{FIELD} can't set {name!r:.60}", FIELD)
        if not _reads(template, name):
            raise Refused(f"the model's chat template doesn't read {name!r:.60}", name)
