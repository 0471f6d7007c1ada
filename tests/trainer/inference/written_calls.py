"""Writes calls of tools as the models of each form do, after their chat templates, and as transformers' parser reads them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = tuple[str, Mapping[str, Any]]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _listed(calls: Sequence[Call], key: str = "arguments") -> str:
    return dumped([{"name": name, key: arguments} for name, arguments in calls])


def _each(form: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        return "".join(
            form.replace("NAME", name).replace("NUMBER", str(place)).replace("JSON", dumped(given))
            for place, (name, given) in enumerate(calls)
        )

    return write


def _around(begin: str, write: Callable[[Sequence[Call]], str], end: str) -> Any:
    return lambda calls: begin + write(calls) + end


def _value(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def _tags(call: str, argument: str) -> Callable[[Sequence[Call]], str]:
    """call: the text of a call with NAME and ARGUMENTS. argument: that of each argument, with KEY, VALUE, and TEXT."""

    def write(calls: Sequence[Call]) -> str:
        made = ""
        for name, arguments in calls:
            inner = "".join(
                argument.replace("KEY", key)
                .replace("TEXT", dumped(isinstance(value, str)))
                .replace("VALUE", _value(value))
                for key, value in arguments.items()
            )
            made += call.replace("NAME", name).replace("ARGUMENTS", inner)
        return made

    return write


def _bare(value: Any, mark: str) -> str:
    """A value as Gemma's templates write it."""
    if isinstance(value, str):
        return mark + value + mark
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_bare(each, mark)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_bare(each, mark) for each in value) + "]"
    return dumped(value)


def _gemma(begin: str, end: str, mark: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: "".join(
        f"{begin}call:{name}{_bare(given, mark)}{end}" for name, given in calls
    )


def _python(calls: Sequence[Call]) -> str:
    made = []
    for name, arguments in calls:
        inner = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        made.append(f"{name}({inner})")
    return f"[{', '.join(made)}]"


def _several(form: str) -> Callable[[Sequence[Call]], str]:
    write = _each(form)
    return lambda calls: "\n".join(write([call]) for call in calls)


_CALL = '{"name": "NAME", "arguments": JSON}'
_KEYED = _tags(
    "<tool_call>NAME<tool_sep>\nARGUMENTS</tool_call>\n",
    "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
)
WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": _several(f"<tool_call>\n{_CALL}\n</tool_call>"),
    "qwen3-coder": _tags(
        "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>\n",
        "<parameter=KEY>\nVALUE\n</parameter>\n",
    ),
    "glm-4.5": _tags(
        "\n<tool_call>NAME\nARGUMENTS</tool_call>",
        "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    ),
    "minimax-m2": _around(
        "<minimax:tool_call>\n",
        _tags(
            '<invoke name="NAME">\nARGUMENTS</invoke>\n',
            '<parameter name="KEY">VALUE</parameter>\n',
        ),
        "</minimax:tool_call>",
    ),
    "deepseek-v3": _around(
        "<｜tool▁calls▁begin｜>",
        _each("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.2": _around(
        "<｜DSML｜function_calls>\n",
        _tags(
            '<｜DSML｜invoke name="NAME">\nARGUMENTS</｜DSML｜invoke>\n',
            '<｜DSML｜parameter name="KEY" string="TEXT">VALUE</｜DSML｜parameter>\n',
        ),
        "</｜DSML｜function_calls>",
    ),
    "deepseek-v4": _around(
        "<｜DSML｜tool_calls>\n",
        _tags(
            '<｜DSML｜invoke name="NAME">\nARGUMENTS</｜DSML｜invoke>\n',
            '<｜DSML｜parameter name="KEY" string="TEXT">VALUE</｜DSML｜parameter>\n',
        ),
        "</｜DSML｜tool_calls>",
    ),
    "kimi-k2": _around(
        "<|tool_calls_section_begin|>",
        _each(
            "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>JSON<|tool_call_end|>"
        ),
        "<|tool_calls_section_end|>",
    ),
    "mistral": _each("[TOOL_CALLS]NAME[ARGS]JSON"),
    "llama-3": lambda calls: "<|python_tag|>" + "; ".join(
        dumped({"name": name, "parameters": given}) for name, given in calls
    ),
    "llama-4": _around("<|python_start|>", _python, "<|python_end|>"),
    "lfm-2": _around("<|tool_call_start|>", _python, "<|tool_call_end|>"),
    "granite-3": _around("<|tool_call|>", _listed, ""),
    "nemotron-2": _around("<TOOLCALL>", _listed, "</TOOLCALL>"),
    "hunyuan-a13b": _around("<tool_calls>\n", _listed, "\n</tool_calls>"),
    "hunyuan-3": _around("<tool_calls>\n", _KEYED, "</tool_calls>"),
    "function-gemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma-4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
}  # fmt: skip
OTHERS: list[tuple[str, Callable[[Sequence[Call]], str]]] = [
    ("mistral", _around("[TOOL_CALLS]", _listed, "")),
    ("mistral", _each("[TOOL_CALLS]NAME[CALL_ID]a1B2c3D4e[ARGS]JSON")),
    (
        "deepseek-v3",
        _around(
            "<｜tool▁calls▁begin｜>",
            _each("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>"),
            "<｜tool▁calls▁end｜>",
        ),
    ),
    ("llama-3", lambda calls: _listed(calls, "parameters")),
    ("llama-4", _python),
    ("hunyuan-3", lambda calls: WRITERS["hunyuan-3"](calls).replace(">", ":opensource>")),
    ("granite-3", _around("<|tool_call|> ", _listed, "\n")),
]  # fmt: skip
"""(name of a form, a writer of another spelling of it)."""
AS_TEXT = ("qwen3-coder", "glm-4.5", "minimax-m2", "hunyuan-3")
"""Forms in which a text has no quotes, so that its schema says whether it is one."""
TAGGED = (*AS_TEXT, "deepseek-v3.2", "deepseek-v4")
"""Forms in which a mark ends a text."""
