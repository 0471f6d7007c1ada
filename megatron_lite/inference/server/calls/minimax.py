"""Calls of tools as MiniMax M2 writes them.

<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Köln</parameter>
</invoke>
</minimax:tool_call>
"""

import re

from megatron_lite.inference.server.calls.form import CallForm, Named, Schemas
from megatron_lite.inference.server.calls.json_values import typed
from megatron_lite.inference.server.calls.marked import between, parameters

_INVOKE = re.compile(r"<invoke name=\"?([^\"<>\n]+)\"?>")
_PARAMETER = re.compile(r"<parameter name=\"?([^\"<>\n]+)\"?>\n?")


def _read(text: str, schemas: Schemas) -> list[Named]:
    found = []
    for invoke, inner in between(text, _INVOKE, "</invoke>"):
        name = invoke[1]
        pairs = parameters(inner, _PARAMETER)
        found.append(Named(name, typed(pairs, schemas.get(name, {}))))
    return found


MINIMAX_M2 = CallForm(
    "minimax-m2",
    _read,
    (("<minimax:tool_call>", "</minimax:tool_call>"),),
    signs=("<minimax:tool_call>",),
)
