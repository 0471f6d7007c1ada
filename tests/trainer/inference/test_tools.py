"""Calls of tools: what is one, what requests may say about tools, and what templates get."""

import json
from typing import Any

import pytest

from megatron_lite.data.template_messages import as_template_expects
from megatron_lite.inference.server.errors import Refused
from megatron_lite.inference.server.fields import Fields
from megatron_lite.inference.server.messages import read_messages
from megatron_lite.inference.server.tools import Tools, read_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = Tools((WEATHER, TIME))


def split(tools: Tools, text: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """The text without calls, and the calls, of an answer."""
    stream = tools.stream()
    first, last = stream.add(text), stream.finish()
    return first.text + last.text, tools.openai_calls(first.calls + last.calls)


def read(**fields: Any) -> Tools | None:
    return read_tools(Fields.parse(json.dumps(fields).encode()))


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (
            'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
            "I look.",
            [("weather", {"city": "Köln"})],
        ),
        (
            '<tool_call>{"name": "time", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "weather", "arguments": {"city": "a"}}</tool_call>',
            "",
            [("time", {}), ("weather", {"city": "a"})],
        ),
        (
            '{"name": "weather", "parameters": {"city": "b"}}',
            "",
            [("weather", {"city": "b"})],
        ),
        ('[{"name": "time"}, {"name": "time", "arguments": {}}]', "", [("time", {}), ("time", {})]),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
        ('{"name": "time", "arguments": 3}', '{"name": "time", "arguments": 3}', []),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ('{"city": "Köln"}', '{"city": "Köln"}', []),
        ("plain text", "plain text", []),
        (
            'A. <tool_call>{"name": "time"}</tool_call><tool_call>{"name": "wea',
            'A. <tool_call>{"name": "wea',
            [("time", {})],
        ),
        (
            '<tool_call>{"name": "other"}</tool_call><tool_call>{"name": "time"}</tool_call>',
            '<tool_call>{"name": "other"}</tool_call>',
            [("time", {})],
        ),
        (r'{"name": "weather", "arguments": {"city": "\ud800"}}', "", [("weather", {"city": "\ud800"})]),
    ],
)  # fmt: skip
def test_calls_are_found_in_an_answer(
    text: str, rest: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    left, found = split(TOOLS, text)
    assert left == rest
    made = [call["function"] for call in found]
    assert [(each["name"], json.loads(each["arguments"])) for each in made] == calls
    assert len({call["id"] for call in found}) == len(calls)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "form",
    [
        '{{"name": "weather", "arguments": {{"city": {}}}}}',
        "<tool_call><function=time><parameter=days>{}</parameter></function></tool_call>",
        '<minimax:tool_call><invoke name="time"><parameter name="a">{}</parameter></invoke></minimax:tool_call>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{{\"a\": {}}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
)  # fmt: skip
def test_arguments_that_no_client_can_read_are_no_call(form: str, value: str) -> None:
    """They are no JSON, although Python's parser reads them."""
    text = form.format(value)
    assert split(TOOLS, text) == (text, ())


@pytest.mark.parametrize("depth", range(800, 1000, 20))
def test_deep_arguments_are_a_call_or_text(depth: int) -> None:
    """Python's parser reads deeper values than its writer writes."""
    text = '{"name": "time", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
    rest, calls = split(TOOLS, text)
    assert rest == ("" if calls else text)


def test_calls_can_be_sent_in_a_stream() -> None:
    _, (call,) = split(TOOLS, r'{"name": "weather", "arguments": {"city": "\ud800ö"}}')
    assert json.loads(json.dumps(call, ensure_ascii=False).encode()) == call


SHOP = {
    "type": "function",
    "function": {
        "name": "buy",
        "parameters": {
            "type": "object",
            "properties": {
                "note": {"type": "string"},
                "count": {"type": "integer"},
                "gift": {"type": "boolean"},
                "sizes": {"type": "array"},
            },
        },
    },
}


def xml(name: str, **values: str) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def test_calls_in_the_xml_of_qwen_are_read_by_the_schema() -> None:
    values = {
        "note": "12\n\nx < y",
        "count": "3",
        "gift": "True",
        "sizes": '["a", 1]',
        "other": "b",
    }
    text = f"<think>\nI buy.\n</think>\n\n{xml('buy', **values)}\n{xml('time')}"
    rest, calls = split(Tools((SHOP, TIME)), text)
    assert rest == "<think>\nI buy.\n</think>"
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    arguments = {**values, "count": 3, "gift": True, "sizes": ["a", 1]}
    assert made == [("buy", arguments), ("time", {})]


@pytest.mark.parametrize("text", [xml("unknown"), xml("buy", note="a").split("</function>")[0]])
def test_xml_of_an_unknown_tool_or_without_its_end_stays_text(text: str) -> None:
    assert split(Tools((SHOP,)), text) == (text, ())


def keyed(name: str, **values: str) -> str:
    pairs = "".join(
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
        for key, value in values.items()
    )
    return f"<tool_call>{name}{pairs}\n</tool_call>"


def invoked(*calls: tuple[str, dict[str, str]]) -> str:
    made = ""
    for name, values in calls:
        parameters = "".join(
            f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items()
        )
        made += f'<invoke name="{name}">\n{parameters}</invoke>\n'
    return f"<minimax:tool_call>\n{made}</minimax:tool_call>"


VALUES = {"note": "12\n\nx < y", "count": "3", "gift": "true", "sizes": '["a", 1]', "other": "b"}
READ = {**VALUES, "count": 3, "gift": True, "sizes": ["a", 1]}


@pytest.mark.parametrize(
    "text",
    [
        f"I buy.\n{keyed('buy', **VALUES)}\n{keyed('time')}",
        f"I buy.\n{keyed('buy', **VALUES)}{keyed('time')}".replace("\n<arg", "<arg"),
        f"I buy.\n\n{invoked(('buy', VALUES), ('time', {}))}",
        f"I buy.\n\n{invoked(('buy', VALUES), ('unknown', {}), ('time', {}))}",
    ],
    ids=["GLM-4.5", "GLM-4.7", "MiniMax M2", "an unknown one"],
)
def test_calls_in_the_xml_of_glm_and_minimax_are_read_by_the_schema(text: str) -> None:
    rest, calls = split(Tools((SHOP, TIME)), text)
    assert rest == "I buy."
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert made == [("buy", READ), ("time", {})]


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (OPTIONAL, "50667", "50667"),
        (OPTIONAL, "true", "true"),
        (OPTIONAL, '"a"', '"a"'),
        (OPTIONAL, '{"a": 1}', '{"a": 1}'),
        (OPTIONAL, "None", None),
        (OPTIONAL, "null", None),
        ({"type": ["string", "null"]}, "1.0", "1.0"),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "50667", 50667),
        ({"oneOf": [{"type": "string"}, {"type": "number"}]}, "7", 7),
        ({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "string"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1]", [1]),
        ({"anyOf": 3, "type": None}, "3", 3),
    ],
)
@pytest.mark.parametrize("write", [xml, keyed])
def test_an_optional_text_that_looks_like_a_number_stays_text(
    write: Any, schema: dict[str, Any], written: str, value: object
) -> None:
    function = {"name": "send", "parameters": {"properties": {"code": schema}}}
    _, (call,) = split(Tools(({"function": function},)), write("send", code=written))
    assert json.loads(call["function"]["arguments"]) == {"code": value}


@pytest.mark.parametrize(
    "text",
    [
        keyed("unknown"),
        keyed("buy", note="a").split("</arg_value>")[0],
        invoked(("unknown", {})),
        invoked(("buy", {"note": "a"})).split("</invoke>")[0],
        "<minimax:tool_call>",
        "<tool_call>",
        "time",
    ],
)
def test_unknown_and_incomplete_calls_of_glm_and_minimax_stay_text(text: str) -> None:
    assert split(Tools((SHOP, TIME)), text) == (text, ())


def deepseek(*calls: str) -> str:
    made = "".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


@pytest.mark.parametrize(
    "text",
    [
        deepseek('weather<｜tool▁sep｜>{"city": "Köln"}', "time<｜tool▁sep｜>{}"),
        deepseek(
            'function<｜tool▁sep｜>weather\n```json\n{"city": "Köln"}\n```',
            "\nfunction<｜tool▁sep｜>time\n```json\n{}\n```",
        ),
        deepseek(
            'weather<｜tool▁sep｜>{"city": "Köln"}',
            "unknown<｜tool▁sep｜>{}",
            "time<｜tool▁sep｜>{",
            "time<｜tool▁sep｜>{}",
        ),
    ],
    ids=["V3.1", "V3", "unknown and broken ones"],
)
def test_calls_of_deepseek_are_read(text: str) -> None:
    rest, calls = split(TOOLS, f"I look.{text}")
    assert rest == "I look."
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert made == [("weather", {"city": "Köln"}), ("time", {})]


@pytest.mark.parametrize(
    "text", [deepseek(), deepseek("unknown<｜tool▁sep｜>{}"), deepseek("time<｜tool▁sep｜>3")]
)
def test_unknown_and_incomplete_calls_of_deepseek_stay_text(text: str) -> None:
    assert split(TOOLS, text) == (text, ())


@pytest.mark.parametrize(
    ("expression", "is_text"),
    [
        ("'a' + tool['function']['arguments'] + 'b'", True),
        ("'a' + tool.function.arguments", True),
        ("tool['function']['arguments'] | tojson", False),
        ("'a' + (tool.function.arguments | tojson) + 'b'", False),
        ("'a' + tool.arguments | tojson", False),
    ],
)
def test_a_template_that_joins_arguments_gets_them_as_text(expression: str, is_text: bool) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    (message,) = as_template_expects(messages, "{{ " + expression + " }}")
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments == ('{"city": "Köln"}' if is_text else {"city": "Köln"})


def test_calls_in_python_are_read_and_not_executed() -> None:
    text = ' [buy(note="a\\nb", count=-3, gift=True, sizes=["a", {"b": None}]), time()]\n'
    rest, calls = split(Tools((SHOP, TIME)), text)
    assert rest == ""
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    sizes = ["a", {"b": None}]
    assert made == [
        ("buy", {"note": "a\nb", "count": -3, "gift": True, "sizes": sizes}),
        ("time", {}),
    ]


def test_calls_in_python_may_have_words_of_json() -> None:
    """LFM 2.5 writes objects so."""
    text = """[buy(note='true', gift=false, sizes={"a": true, "b": [null]})]"""
    _, (call,) = split(Tools((SHOP,)), text)
    expected = {"note": "true", "gift": False, "sizes": {"a": True, "b": [None]}}
    assert json.loads(call["function"]["arguments"]) == expected


@pytest.mark.parametrize(
    "text",
    [
        "[unknown()]",
        "[time(1)]",
        "[time(**{'a': 1})]",
        "[time(a=open('b'))]",
        "[time(a={1, 2})]",
        "[time(a=b'c')]",
        "[time(a=1e999)]",
        "[time(), 3]",
        "time()",
        "[time()",
        "[time() for a in b]",
        "[time(a=" + "[" * 5000 + "]" * 5000 + ")]",
        "[time(a=" + "-" * 60000 + "1)]",
        "[time(a='\x00')]",
        "[]",
        "[",
    ],
)
def test_other_python_stays_text(text: str) -> None:
    assert split(Tools((SHOP, TIME)), text) == (text, ())


def test_a_request_can_limit_the_answer_to_one_call() -> None:
    tools = read(tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert tools is not None
    _, calls = split(tools, '[{"name": "time"}, {"name": "weather"}]')
    assert [call["function"]["name"] for call in calls] == ["time"]


def test_a_choice_says_which_tools_must_be_called() -> None:
    assert read(tools=[WEATHER], tool_choice="none") is None
    assert read() is None
    every = read(tools=[WEATHER, TIME], tool_choice="required")
    assert every is not None
    assert every.forced == ("weather", "time")
    named = {"type": "function", "function": {"name": "time"}}
    one = read(tools=[WEATHER, TIME], tool_choice=named)
    assert one is not None
    (form,) = one.schema["anyOf"]
    assert form["properties"] == {"name": {"const": "time"}, "arguments": {"type": "object"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_a_choice_may_allow_a_part_of_the_tools() -> None:
    """OpenAI's clients send all tools, so that the prompt stays the same, and allow some of them."""
    tools = read(tools=[WEATHER, TIME], tool_choice=allowed("auto", "time"))
    assert tools is not None
    assert tools.described == (WEATHER, TIME)
    assert split(tools, '{"name": "weather"}') == ('{"name": "weather"}', ())
    assert [call["function"]["name"] for call in split(tools, '{"name": "time"}')[1]] == ["time"]
    tools = read(tools=[WEATHER, TIME], tool_choice=allowed("required", "time"))
    assert tools is not None
    assert tools.forced == ("time",)


def test_parameters_that_are_null_are_none() -> None:
    tools = read(tools=[{"type": "function", "function": {"name": "time", "parameters": None}}])
    assert tools is not None
    assert tools.schemas == {"time": {}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [TIME], "tool_choice": allowed("auto", "b")}, "name of one of the tools"),
        ({"tools": [TIME], "tool_choice": allowed("often", "time")}, "name of one of the tools"),
        ({"tools": [TIME], "tool_choice": allowed("auto")}, "name of one of the tools"),
        ({"tools": [TIME], "parallel_tool_calls": "no"}, "should be true or false"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": "weather"}, "list of up to 128 tools"),
        ({"tools": [{"function": {}}]}, "a function that has a name"),
        ({"tools": [{"function": {"name": "a", "parameters": 3}}]}, "should be a JSON schema"),
        ({"tools": [TIME], "tool_choice": "weather"}, "the name of one of the tools"),
        ({"tools": [TIME], "tool_choice": {"function": {"name": "b"}}}, "name of one of the tools"),
    ],
)
def test_tools_of_another_form_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        read(**fields)


def test_templates_get_arguments_as_objects() -> None:
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "a"}'}}
    broken = {"id": "2", "function": {"name": "weather", "arguments": "{"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    user, assistant, tool = read_messages(messages)
    assert user == messages[0]
    assert tool == messages[2]
    assert assistant["content"] == ""
    first, second = (each["function"]["arguments"] for each in assistant["tool_calls"])
    assert (first, second) == ({"city": "a"}, "{")
