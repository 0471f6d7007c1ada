"""Tools of chat requests: what the template gets, the form of an answer that must be a call, and the calls in an answer."""

import json
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from megatron_lite.inference.grammar import ANY_OBJECT
from megatron_lite.inference.server.deepseek_calls import CALLS, read_deepseek_calls
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.openai_answers import Choice, Piece
from megatron_lite.inference.server.python_calls import read_python_calls
from megatron_lite.inference.server.xml_calls import (
    Named,
    read_invocations,
    read_keyed_call,
    read_xml_call,
)

MOST_TOOLS = 128
_MARKED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A call as Hermes, Qwen, GLM-4.5 and many others write it: JSON, or XML."""
_INVOCATIONS = re.compile(r"<minimax:tool_call>(.*?)(?:</minimax:tool_call>|\Z)", re.DOTALL)
"""Calls as MiniMax M2 writes them."""
_ARGUMENTS = ("arguments", "parameters")
"""The key of the arguments in a call; Llama 3 writes the second one."""


@dataclass(frozen=True)
class Tools:
    """The tools of a request whose answer may call them."""

    described: tuple[Mapping[str, Any], ...]
    """The tools as in the request. The chat template gets them."""
    forced: tuple[str, ...] = ()
    """Names of the tools of which the answer must call one; (): a call is the model's choice."""
    single: bool = False
    """True if an answer may have only one call."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of an answer that must be a call."""
        return {"anyOf": [_call_schema(tool) for tool in self._forced_tools()]}

    @property
    def harmony_messages(self) -> list[tuple[str, Mapping[str, Any]]]:
        """(header, schema of the arguments) of each call that an answer in harmony must be. See harmony_grammar."""
        found = []
        for tool in self._forced_tools():
            recipient = json.dumps(f"commentary to=functions.{tool['name']} ")
            header = f'<|channel|> {recipient} <|constrain|> "json"'
            found.append((header, tool.get("parameters") or ANY_OBJECT))
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tools."""
        return tuple(map(_name, self.described))

    def openai_calls(self, calls: Sequence[tuple[str, str]]) -> tuple[dict[str, Any], ...]:
        """Return calls of (name, text of the arguments) in OpenAI's form, as many as the answer may have."""
        return tuple(_openai_call(*call) for call in calls[: 1 if self.single else None])

    def _forced_tools(self) -> list[Mapping[str, Any]]:
        return [tool["function"] for tool in self.described if _name(tool) in self.forced]

    def split(self, text: str) -> tuple[str, tuple[dict[str, Any], ...]]:
        """Return (text without calls, calls). The calls have OpenAI's form. Text that is no call stays as it is."""
        for marks, read in self._readers():
            if marks.search(text):
                rest, found = _taken_out(text, marks, read)
                break
        else:
            rest, found = "", self._json_calls(text) or self._known(read_python_calls(text))
        if not found:
            return text, ()
        calls = found[:1] if self.single else found
        return rest, tuple(calls)

    def _readers(self) -> Iterator[tuple[re.Pattern[str], Callable[[str], list[dict[str, Any]]]]]:
        """Yield (marks around calls, the function that reads the calls between two marks)."""
        yield _MARKED, self._marked_calls
        yield _INVOCATIONS, lambda text: self._known(read_invocations(text, self._schemas))
        yield CALLS, lambda text: self._known(read_deepseek_calls(text))

    @property
    def _schemas(self) -> dict[str, Mapping[str, Any]]:
        return {_name(tool): tool["function"].get("parameters", {}) for tool in self.described}

    def _known(self, calls: Sequence[Named]) -> list[dict[str, Any]]:
        """Return the calls of known tools in OpenAI's form, without those whose arguments have no form in JSON."""
        written = [(name, _json(arguments)) for name, arguments in calls if name in self.names]
        return [_openai_call(name, text) for name, text in written if text is not None]

    def _marked_calls(self, text: str) -> list[dict[str, Any]]:
        """Return the calls between two marks: in XML or in JSON."""
        schemas = self._schemas
        for read in (read_xml_call, read_keyed_call):
            named = read(text, schemas)
            if named is not None:
                return self._known([named])
        return self._json_calls(text)

    def _json_calls(self, text: str) -> list[dict[str, Any]]:
        """Return the calls in a JSON object, or in a list of objects. Another text has none."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        several = value if isinstance(value, list) else [value]
        named = [_named(each) for each in several]
        return self._known([each for each in named if each is not None])


def read_tools(fields: Fields) -> Tools | None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Returns None if the answer can't call a tool.

    Raises Refused.
    """
    described, choice = fields.any("tools"), fields.any("tool_choice")
    single = fields.any("parallel_tool_calls") is False
    if described in (None, []):
        if choice not in (None, "none", "auto"):
            raise Refused("tool_choice needs tools", "tool_choice")
        return None
    _check(described)
    tools = Tools(tuple(described), single=single)
    if choice == "none":
        return None
    if choice in (None, "auto"):
        return tools
    names = tuple(_name(tool) for tool in described)
    if choice == "required":
        return replace(tools, forced=names)
    wanted = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(wanted, dict) or wanted.get("name") not in names:
        raise Refused(
            "tool_choice should be none, auto, required, or an object with the name of one of the tools, "
            f"found {choice!r:.80}",
            "tool_choice",
        )
    return replace(tools, forced=(wanted["name"],))


async def with_calls(
    pieces: AsyncGenerator[Piece, None], tools: Tools
) -> AsyncGenerator[Piece, None]:
    """Hold the text of each choice back until its end, and yield it as one piece with its calls."""
    held: dict[int, Choice] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            choice = held.setdefault(piece.choice, Choice())
            choice.add(piece)
            if piece.end is not None:
                text, calls = tools.split(choice.text)
                end = "tool_calls" if calls else piece.end
                yield Piece(piece.choice, text, tuple(choice.tokens), end, calls, choice.reasoning)


def _check(described: Any) -> None:
    if not isinstance(described, list) or len(described) > MOST_TOOLS:
        raise Refused(f"tools should be a list of up to {MOST_TOOLS} tools", "tools")
    for number, tool in enumerate(described):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(
                f"tool {number} should be an object with a function that has a name, found {tool!r:.60}",
                "tools",
            )
        if not isinstance(function.get("parameters", {}), dict):
            raise Refused(f"the parameters of tool {number} should be a JSON schema", "tools")


def _named(value: Any) -> Named | None:
    """Return (name, arguments) of a call in JSON; None for another value."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = [value[key] for key in _ARGUMENTS if key in value]
    arguments: Any = given[0] if given else {}
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def _taken_out(
    text: str, marks: re.Pattern[str], read: Callable[[str], list[dict[str, Any]]]
) -> tuple[str, list[dict[str, Any]]]:
    """Return (text without calls, calls). Text between marks that is no call of a known tool stays as it is."""
    calls: list[dict[str, Any]] = []

    def replaced(found: re.Match[str]) -> str:
        own = read(found[1])
        calls.extend(own)
        return "" if own else found[0]

    return marks.sub(replaced, text).strip(), calls


def _json(arguments: Mapping[str, Any]) -> str | None:
    """Return arguments as JSON; None for NaN, infinity and values that are nested too deeply."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair can't be sent, except as an escape.
        return json.dumps(arguments)
    except (ValueError, RecursionError):
        return None
    return text


def _openai_call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("parameters") or ANY_OBJECT
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
