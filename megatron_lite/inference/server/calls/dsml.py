"""Calls of tools in DSML, as DeepSeek V3.2 writes them. In V4 the outer mark is called `tool_calls`.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

A value is text, or JSON if `string` is false.
"""

import re

from megatron_lite.inference.server.calls.form import CallForm, Named, Schemas
from megatron_lite.inference.server.calls.json_values import value_of
from megatron_lite.inference.server.calls.marked import between

_INVOKE = re.compile(r'<｜DSML｜invoke\s+name="([^"]+)"\s*>')
_INVOKE_END = "</｜DSML｜invoke>"
_PARAMETER = re.compile(r'<｜DSML｜parameter\s+name="([^"]+)"\s+string="(true|false)"\s*>')
_PARAMETER_END = "</｜DSML｜parameter>"


def _read(text: str, schemas: Schemas) -> list[Named]:
    found = []
    for invoke, inner in between(text, _INVOKE, _INVOKE_END):
        arguments = {}
        for parameter, value in between(inner, _PARAMETER, _PARAMETER_END):
            key, is_text = parameter.groups()
            arguments[key] = value if is_text == "true" else value_of(value)
        found.append(Named(invoke[1], arguments))
    return found


def _form(name: str, outer: str) -> CallForm:
    marks = f"<｜DSML｜{outer}>", f"</｜DSML｜{outer}>"
    return CallForm(name, _read, (marks,), signs=("｜DSML｜", outer), inner=("｜DSML｜",))


DEEPSEEK_V3_2 = _form("deepseek-v3.2", "function_calls")
DEEPSEEK_V4 = _form("deepseek-v4", "tool_calls")
