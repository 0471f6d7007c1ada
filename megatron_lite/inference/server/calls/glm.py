"""Calls of tools as GLM-4.5 to 4.7 write them.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Köln</arg_value>
</tool_call>
"""

import re

from megatron_lite.inference.server.calls.form import CallForm, Named, Schemas
from megatron_lite.inference.server.calls.hermes import TOOL_CALL
from megatron_lite.inference.server.calls.json_values import typed
from megatron_lite.inference.server.calls.marked import keys_and_values

_CALL = re.compile(r"([^\s<>{}\[\]\"]+)\s*((?:<arg_key>.*</arg_value>)?)", re.DOTALL)


def _read(text: str, schemas: Schemas) -> list[Named]:
    found = _CALL.fullmatch(text.strip())
    if found is None:
        return []
    name, inner = found.groups()
    return [Named(name, typed(keys_and_values(inner), schemas.get(name, {})))]


GLM = CallForm(
    "glm-4.5",
    _read,
    (TOOL_CALL,),
    signs=("<arg_key>",),
    inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    must_end=True,
)
