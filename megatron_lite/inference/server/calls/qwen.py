"""Calls of tools as Qwen3-Coder, Qwen 3.5 and Nemotron 3 write them.

<tool_call>
<function=weather>
<parameter=city>
Köln
</parameter>
</function>
</tool_call>
"""

import re

from megatron_lite.inference.server.calls.form import CallForm, Named, Schemas
from megatron_lite.inference.server.calls.hermes import TOOL_CALL
from megatron_lite.inference.server.calls.json_values import typed
from megatron_lite.inference.server.calls.marked import parameters

_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")


def _read(text: str, schemas: Schemas) -> list[Named]:
    found = _FUNCTION.fullmatch(text.strip())
    if found is None:
        return []
    name, inner = found.groups()
    return [Named(name, typed(parameters(inner, _PARAMETER), schemas.get(name, {})))]


QWEN_CODER = CallForm("qwen3-coder", _read, (TOOL_CALL,), signs=("<function=",))
