"""Calls of tools as DeepSeek V3.1 writes them, and as V3 and R1 do. DeepSeek's tokenizers have these marks as ordinary tokens.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Köln"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3 and R1 write `function` in place of the name, and behind `<｜tool▁sep｜>` the name and a block of code with JSON.
"""

import json
import re

from megatron_lite.inference.server.calls.form import CallForm, Named, Schemas
from megatron_lite.inference.server.calls.marked import between

_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CALL = re.compile(_BEGIN)
_CODE = re.compile(r"\s*(\S+)\s*```json")
_CODE_END = "```"


def _read(text: str, schemas: Schemas) -> list[Named]:
    """Return the complete calls whose arguments are a JSON object."""
    found = []
    for _, call in between(text, _CALL, _END):
        name, _, arguments = call.partition(_SEPARATOR)
        code = _CODE.match(arguments)
        if code is not None:
            name = code[1]
            arguments = arguments[code.end() :].rstrip().removesuffix(_CODE_END)
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(Named(name.strip(), value))
    return found


DEEPSEEK_V3 = CallForm(
    "deepseek-v3",
    _read,
    (_CALLS,),
    signs=_CALLS[:1],
    inner=(_BEGIN, _SEPARATOR, _END),
    quoted=True,
)
