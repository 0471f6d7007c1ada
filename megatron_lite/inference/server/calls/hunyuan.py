"""Calls of tools as Hunyuan writes them: a JSON list in A13B, as Jamba has it too, and keys and values in version 3.

    <tool_calls>[{"name": "weather", "arguments": {"city": "Köln"}}]</tool_calls>
    <tool_calls><tool_call>weather<tool_sep><arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call></tool_calls>

The published tokenizer of version 3 has a suffix in all of its marks: `<tool_calls:opensource>`.
"""

import re

from megatron_lite.inference.server.calls.form import CallForm, Named, Schemas
from megatron_lite.inference.server.calls.json_values import read_json, typed
from megatron_lite.inference.server.calls.marked import between, keys_and_values

_CALLS = ("<tool_calls>", "</tool_calls>")
_SUFFIX = ":opensource"
_CALL = re.compile("<tool_call>")
_INNER = (
    "<tool_call>", "</tool_call>", "<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip


def _with_suffix(mark: str) -> str:
    return mark.replace(">", f"{_SUFFIX}>")


_LONG = {_with_suffix(mark): mark for mark in _INNER}


def _read(text: str, schemas: Schemas) -> list[Named]:
    for long, mark in _LONG.items():
        text = text.replace(long, mark)
    found = []
    for _, call in between(text, _CALL, "</tool_call>"):
        name, separator, inner = call.partition("<tool_sep>")
        name = name.strip()
        if separator:
            found.append(Named(name, typed(keys_and_values(inner), schemas.get(name, {}))))
    return found


HUNYUAN_A13B = CallForm("hunyuan-a13b", read_json, (_CALLS,), signs=_CALLS[:1], quoted=True)
HUNYUAN_3 = CallForm(
    "hunyuan-3",
    _read,
    (_CALLS, (_with_suffix(_CALLS[0]), _with_suffix(_CALLS[1]))),
    signs=("<tool_sep",),
    inner=(*_INNER, *_LONG),
)
