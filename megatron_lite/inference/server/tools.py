"""Tools of chat requests: what the template gets, the form of an answer that must be a call, and the calls in an answer."""

import json
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from megatron_lite.inference.answer import Call
from megatron_lite.inference.grammar import ANY_OBJECT
from megatron_lite.inference.server.calls.form import CallForm, random_id
from megatron_lite.inference.server.calls.llama3 import LLAMA_3
from megatron_lite.inference.server.calls.stream import CallStream
from megatron_lite.inference.server.calls.table import FORMS
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.pieces import Piece

MOST_TOOLS = 128


@dataclass(frozen=True)
class Tools:
    """The tools of a request whose answer may call them."""

    described: tuple[Mapping[str, Any], ...]
    """The tools as in the request. The chat template gets them."""
    forced: tuple[str, ...] = ()
    """Names of the tools of which the answer must call one; (): a call is the model's choice."""
    allowed: tuple[str, ...] | None = None
    """Names of the tools that the answer may call, if these are not all."""
    single: bool = False
    """True if an answer may have only one call."""
    forms: tuple[CallForm, ...] = FORMS
    """The forms in which the model may write calls."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of an answer that must be a call."""
        tools = enumerate(self._forced_tools())
        return {"anyOf": [_call_schema(tool, number) for number, tool in tools]}

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
        """The names of the tools that the answer may call."""
        return tuple(map(_name, self.described)) if self.allowed is None else self.allowed

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The JSON schema of the parameters of each tool that the answer may call, by name."""
        parameters = {_name(tool): tool["function"].get("parameters") for tool in self.described}
        return {name: parameters[name] or {} for name in self.names}

    def stream(self) -> CallStream:
        """Return the state of an answer's beginning. An answer that must be a call is JSON without marks."""
        return CallStream((LLAMA_3,) if self.forced else self.forms, self.schemas)

    def calls_behind(self, thought: str) -> list[Call]:
        """Return the calls at the end of thinking. Some models call a tool before they have ended their thinking."""
        stream = self.stream()
        found = stream.add(thought).calls + stream.finish().calls
        return found if stream.ends_with_call else []

    def openai_calls(self, calls: Sequence[Call], before: int = 0) -> tuple[dict[str, Any], ...]:
        """Return calls in OpenAI's form, as many as the answer may have. before: number of its earlier calls."""
        allowed = calls[: max(1 - before, 0)] if self.single else calls
        return tuple(map(_openai_call, allowed))

    def _forced_tools(self) -> list[Mapping[str, Any]]:
        return [tool["function"] for tool in self.described if _name(tool) in self.forced]


def read_tools(fields: Fields) -> Tools | None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Returns None if the answer can't call a tool.

    Raises Refused.
    """
    described, choice = fields.any("tools"), fields.any("tool_choice")
    single = not fields.boolean("parallel_tool_calls", default=True)
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
    if choice == "required":
        return replace(tools, forced=tools.names)
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        names = tuple(_chosen(each, tools) for each in allowed["tools"])
        if allowed.get("mode") in ("auto", "required") and names:
            forced = names if allowed["mode"] == "required" else ()
            return replace(tools, allowed=names, forced=forced)
    return replace(tools, forced=(_chosen(choice, tools),))


def _chosen(choice: Any, tools: Tools) -> str:
    """Return the name of a tool in `tool_choice`. Raises Refused."""
    wanted = choice.get("function") if isinstance(choice, dict) else None
    name = wanted.get("name") if isinstance(wanted, dict) else None
    if name not in tools.names:
        raise Refused(
            "tool_choice should be none, auto, required, allowed_tools, or an object with the name of one of the tools, "
            f"found {choice!r:.80}",
            "tool_choice",
        )
    return str(name)


async def with_calls(
    pieces: AsyncGenerator[Piece, None], tools: Tools
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces with the calls taken out of their text."""
    streams: dict[int, CallStream] = {}
    counts: Counter[int] = Counter()
    thoughts: defaultdict[int, list[str]] = defaultdict(list)
    async with aclosing(pieces):
        async for piece in pieces:
            stream = streams.setdefault(piece.choice, tools.stream())
            thoughts[piece.choice].append(piece.reasoning)
            text, found = stream.add(piece.text)
            if piece.end is not None:
                last = stream.finish()
                text, found = text + last.text, found + last.calls
            if piece.end == "stop" and not found and not stream.has_content:
                found = tools.calls_behind("".join(thoughts[piece.choice]))
            calls = tools.openai_calls(found, counts[piece.choice])
            counts[piece.choice] += len(calls)
            end = "tool_calls" if piece.end and counts[piece.choice] else piece.end
            yield replace(piece, text=text, calls=calls, end=end)


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
        if not isinstance(function.get("parameters") or {}, dict):
            raise Refused(f"the parameters of tool {number} should be a JSON schema", "tools")


def _openai_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.identity or random_id(), "type": "function", "function": function}


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _call_schema(function: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the schema of a call. number: of the tool among those that the answer may call."""
    parameters = function.get("parameters")
    # References such as #/$defs/Place mean a place in the parameters: an id makes these the root of their references.
    arguments = {"$id": f"urn:tool:{number}", **parameters} if parameters else ANY_OBJECT
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
