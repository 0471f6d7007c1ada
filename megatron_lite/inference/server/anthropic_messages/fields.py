"""Fields of /v1/messages that a chat has in another form: tools, thinking, and the form of the answer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.fields import Fields

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}


class ToolChoice(NamedTuple):
    """`tool_choice` as a chat has it."""

    choice: Any = None
    parallel: bool = True


def as_function(tool: Any, number: int) -> dict[str, Any]:
    """Return the function of a tool, as a chat has it. Raises Refused."""
    kind = tool.get("type") or "custom" if isinstance(tool, dict) else None
    if kind != "custom" or not isinstance(tool.get("name"), str):
        raise Refused(
            f"tool {number} should have a name and an input_schema, and no type of the API's own; found {tool!r:.80}",
            "tools",
        )
    function = {"name": tool["name"], "parameters": tool.get("input_schema")}
    if "description" in tool:
        function["description"] = tool["description"]
    return function


def read_tool_choice(value: Any) -> ToolChoice:
    """Read `tool_choice`. Raises Refused."""
    if value is None:
        return ToolChoice()
    kind = str(value.get("type")) if isinstance(value, dict) else ""
    if kind != "tool" and kind not in _CHOICES:
        raise Refused(
            f"tool_choice should be an object with the type auto, any, tool or none, found {value!r:.80}",
            "tool_choice",
        )
    choice: Any = _CHOICES.get(kind)
    if kind == "tool":
        choice = {"type": "function", "function": {"name": value.get("name")}}
    return ToolChoice(choice, value.get("disable_parallel_tool_use") is not True)


def read_thinking(value: Any) -> bool | None:
    """Return whether the model should think; None if the request leaves it to the template. Raises Refused.

    The number of tokens for it (`budget_tokens`) and how it is displayed have no effect.
    """
    if value is None:
        return None
    kind = str(value.get("type")) if isinstance(value, dict) else ""
    if kind not in _THINKING:
        raise Refused(
            f"thinking should be an object with the type enabled, adaptive or disabled, found {value!r:.60}",
            "thinking",
        )
    return _THINKING[kind]


class OutputConfig(NamedTuple):
    """`output_config` as a chat has it."""

    effort: Any = None
    form: Mapping[str, Any] | None = None


def read_output_config(value: Any) -> OutputConfig:
    """Read `output_config`. Raises Refused."""
    if value is None:
        return OutputConfig()
    if not isinstance(value, dict):
        raise Refused(f"output_config should be an object, found {value!r:.60}", "output_config")
    inner = Fields(value)
    effort, form = inner.any("effort"), inner.any("format")
    inner.finish()
    if form is None:
        return OutputConfig(effort)
    schema = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(schema, dict) or form.get("type") != "json_schema":
        raise Refused(
            f"the format should have the type json_schema and a schema, found {form!r:.80}",
            "output_config",
        )
    described = {"name": "answer", "schema": schema}
    return OutputConfig(effort, {"type": "json_schema", "json_schema": described})
