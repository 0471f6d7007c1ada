"""Calls of tools as Kimi K2 writes them. The id of a call has its name, and its number in the conversation.

    <|tool_calls_section_begin|>
    <|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Köln"}<|tool_call_end|>
    <|tool_calls_section_end|>

The template reads the id again, so clients get the model's.
"""

import re

from megatron_lite.inference.server.calls.form import CallForm, Named, Schemas
from megatron_lite.inference.server.calls.json_values import object_at

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_HEADER = re.compile(
    r"\s*<\|tool_call_begin\|>\s*((?:functions\.)?(\S+?):\d+)\s*<\|tool_call_argument_begin\|>\s*"
)
_END = re.compile(r"\s*<\|tool_call_end\|>\s*")


def _read(text: str, schemas: Schemas) -> list[Named]:
    found = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        header = _HEADER.match(text, place)
        if header is None:
            raise ValueError("a call begins with its id")
        identity, name = header.groups()
        arguments, place = object_at(text, header.end())
        end = _END.match(text, place)
        if end is None:
            raise ValueError("a call has an end")
        place = end.end()
        found.append(Named(name, arguments, identity))
    return found


KIMI_K2 = CallForm(
    "kimi-k2",
    _read,
    (_SECTION,),
    signs=_SECTION[:1],
    inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    quoted=True,
)
