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

_INVOKE = re.compile(r"<invoke name=\"?([^\">\n]+)\"?>(.*?)</invoke>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter name=\"?([^\">\n]+)\"?>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read(text: str, schemas: Schemas) -> list[Named]:
    return [
        Named(name, typed(_PARAMETER.findall(inner), schemas.get(name, {})))
        for name, inner in _INVOKE.findall(text)
    ]


MINIMAX_M2 = CallForm(
    "minimax-m2",
    _read,
    (("<minimax:tool_call>", "</minimax:tool_call>"),),
    signs=("<minimax:tool_call>",),
)
