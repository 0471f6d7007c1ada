"""Forms in which models write calls of tools: what each is, in pieces of any size, and as transformers' parser reads it."""

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.inference.answer import Call
from megatron_lite.inference.server.calls.stream import CallStream
from megatron_lite.inference.server.calls.table import FORMS, NAMES, forms_of
from tests.trainer.inference.written_calls import AS_TEXT, OTHERS, TAGGED, WRITERS

NAMED = {form.name: form for form in FORMS}
SCHEMAS: dict[str, Any] = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "places": {"type": "array"},
        }
    },
    "time": {},
}
DEEP = {"city": 'Köln "{[}" \\ 雨', "days": 3, "places": [{"a": [1.5, None, True]}, "}]{", []]}
CALLS = [("weather", DEEP), ("time", {})]


def read(
    pieces: Sequence[str], forms: Sequence[Any], schemas: Any = SCHEMAS
) -> tuple[str, list[Call]]:
    stream = CallStream(forms, schemas)
    text, calls = "", []
    for found in (*map(stream.add, pieces), stream.finish()):
        text += found.text
        calls += found.calls
    return text, calls


def found(calls: Sequence[Call]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def cut(text: str, seed: int) -> list[str]:
    """The text in pieces of random sizes."""
    sizes = random.Random(seed)
    pieces = []
    while text:
        size = sizes.randint(1, 9)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def test_every_form_has_a_writer_and_a_name() -> None:
    assert set(WRITERS) == set(NAMED)
    assert set(NAMES) == {"auto", *NAMED}


@pytest.mark.parametrize(("name", "write"), [*WRITERS.items(), *OTHERS])
def test_calls_are_read_in_pieces_of_any_size(name: str, write: Any) -> None:
    for forms in ((NAMED[name],), FORMS):
        is_whole = write(CALLS)[0] == "["  # a list without marks, or a mark with brackets
        before = "" if is_whole and not forms[0].marks[0][1] else "I look {there}.\n\n"
        before = "" if write(CALLS).startswith(("[{", "[weather")) else before
        text = before + write(CALLS)
        for pieces in ([text], list(text), *(cut(text, seed) for seed in range(8))):
            said, calls = read(pieces, forms)
            assert (said, found(calls)) == (before.rstrip(), CALLS)
            assert len({call.identity for call in calls}) in (1, 2)


KEYS = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True).filter(
    lambda key: key not in ("and", "as", "if", "in", "is", "or", "not", "for", "def", "del")
)
TEXTS = st.text(
    st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from('{}[]"\\:,<>|'), max_size=12
)


@cache
def arguments_for(name: str) -> Any:
    """Arguments that a form can write. Texts without quotes have no white space at their ends and no marks."""
    texts = TEXTS if name not in TAGGED else TEXTS.map(lambda text: text.replace("<", "").strip())
    if "gemma" in name:
        texts = TEXTS.map(lambda text: text.replace("<", "").replace("|", ""))
    plain = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | texts
    values = st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    )
    return st.dictionaries(KEYS, values, max_size=4)


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_arguments_come_back(name: str, data: Any) -> None:
    """Random arguments, behind a random text."""
    arguments = data.draw(arguments_for(name))
    kinds = {key: {"type": "string"} for key, value in arguments.items() if isinstance(value, str)}
    schemas = {"weather": {"properties": kinds if name in AS_TEXT else {}}, "time": {}}
    calls = [("weather", arguments), ("time", {})]
    before = data.draw(st.text("ab c.\n", max_size=20))
    text = before + WRITERS[name](calls)
    said, made = read(cut(text, data.draw(st.integers(0, 99))), [NAMED[name]], schemas)
    assert (said, found(made)) == (before.rstrip(), calls)
    assert read([text], FORMS, schemas)[0] == said


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_size_of_the_pieces_changes_nothing_in_broken_answers(name: str, data: Any) -> None:
    """Parts of an answer with calls, in any order."""
    marks = [*NAMED[name].all_marks, "weather", "{", "}", '"', "\n", "a", "[", WRITERS[name](CALLS)]
    text = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=12)))
    for forms in ([NAMED[name]], FORMS):
        expected = read([text], forms)
        for seed in range(3):
            said, calls = read(cut(text, seed), forms)
            assert (said, found(calls)) == (expected[0], found(expected[1]))


@pytest.mark.parametrize(("name", "write"), [*WRITERS.items(), *OTHERS])
def test_calls_of_unknown_tools_stay_text(name: str, write: Any) -> None:
    text = write([("forecast", {"city": "a"})])
    for pieces in ([text], list(text)):
        assert read(pieces, [NAMED[name]]) == (text, [])


@pytest.mark.parametrize(("name", "write"), [*WRITERS.items(), *OTHERS])
def test_an_answer_that_is_cut_off_is_text_or_a_whole_call(name: str, write: Any) -> None:
    text = write([("weather", {"city": "abc {d}"})])
    for length in range(1, len(text)):
        said, calls = read(list(text[:length]), [NAMED[name]])
        assert said == text[:length] or (said, found(calls)) == (
            "",
            [("weather", {"city": "abc {d}"})],
        )


def test_text_is_passed_on_as_soon_as_it_is_no_mark() -> None:
    stream = CallStream([NAMED["kimi-k2"]], SCHEMAS)
    said = [stream.add(piece).text for piece in ("It is", " <|to", "ld", "<|tool_calls_sec", "x")]
    assert said == ["It is", "", " <|told", "", "<|tool_calls_secx"]


def test_a_call_is_passed_on_at_its_end() -> None:
    stream = CallStream([NAMED["hermes"]], SCHEMAS)
    text = WRITERS["hermes"]([("time", {})])
    assert not stream.add(text[:-1]).calls
    assert [call.name for call in stream.add(text[-1:]).calls] == ["time"]
    assert stream.add("\nDone.") == ("Done.", [])


def test_a_mark_in_a_text_of_json_ends_nothing() -> None:
    for name in ("hermes", "kimi-k2", "mistral", "hunyuan-a13b"):
        begin, end = NAMED[name].marks[0]
        calls = [("weather", {"city": f'a " {end or begin} b'}), ("time", {})]
        said, made = read(list(WRITERS[name](calls)), [NAMED[name]])
        assert (said, found(made)) == ("", calls)


def test_ids_are_those_that_the_template_reads_again() -> None:
    _, kimi = read([WRITERS["kimi-k2"](CALLS)], [NAMED["kimi-k2"]])
    assert [call.identity for call in kimi] == ["functions.weather:0", "functions.time:1"]
    _, mistral = read([WRITERS["mistral"](CALLS)], [NAMED["mistral"]])
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call.identity) for call in mistral)
    _, given = read(["[TOOL_CALLS]time[CALL_ID]a1B2c3D4e[ARGS]{}"], [NAMED["mistral"]])
    assert [call.identity for call in given] == ["a1B2c3D4e"]


TEMPLATES = {
    "kimi-k2": "{{ '<|tool_calls_section_begin|>' }}{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}",
    "mistral": "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}",
    "deepseek-v3": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name']}}",
    "deepseek-v3.2": "{%- set dsml = '｜DSML｜' %}{{ '<' + dsml + 'function_calls>' }}",
    "deepseek-v4": "{%- set dsml = '｜DSML｜' %}{{ '<' + dsml + 'tool_calls>' }}",
    "minimax-m2": "{%- set begin = '<minimax:tool_call>' %}",
    "gemma-4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
    "function-gemma": "{{- '<start_function_call>call:' -}}",
    "granite-3": "{%- set tool = \"write <|tool_call|> followed by a JSON list\" %}",
    "hunyuan-3": "{{- '<tool_calls{}>'.format(S) + '<tool_call{}>'.format(S) + '<tool_sep{}>'.format(S) + '<arg_key{}>' }}",
    "glm-4.5": "{{- '\\n<tool_call>' + tc.name -}}<arg_key>{{ k }}</arg_key>",
    "qwen3-coder": "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}",
    "hunyuan-a13b": "{{ '<tool_calls>[' }}{{ '</tool_calls>' }}",
    "hermes": "{{- '\\n<tool_call>\\n{\"name\": \"' }}",
    "llama-4": "{{- '<|python_start|>' + content }}",
    "llama-3": "{{- 'Respond in the format {\"name\": function name, \"parameters\": dictionary}' }}",
    "nemotron-2": "{{- '<TOOLCALL>[' }}",
    "lfm-2": "{{- '<|tool_call_start|>' }}",
}  # fmt: skip


def test_the_chat_template_says_which_form_it_is() -> None:
    assert set(TEMPLATES) == set(NAMED)
    for name, template in TEMPLATES.items():
        assert [form.name for form in forms_of("auto", template)] == [name]
    assert forms_of("auto", "{{ messages }}") == forms_of("auto", "") == FORMS
    assert [form.name for form in forms_of("mistral", TEMPLATES["hermes"])] == ["mistral"]


def test_a_template_with_old_and_new_marks_of_deepseek_writes_the_new_ones() -> None:
    """DSML came later, and no older model writes it. Published templates have one kind of marks."""
    for newer in ("deepseek-v3.2", "deepseek-v4"):
        both = TEMPLATES["deepseek-v3"] + TEMPLATES[newer]
        assert [form.name for form in forms_of("auto", both)] == [newer]


def test_no_begin_mark_is_part_of_another_one() -> None:
    """Otherwise the pieces would decide which of them an answer has."""
    begins = {begin for form in FORMS for begin, _ in form.marks}
    assert not [(a, b) for a in begins for b in begins if a != b and a in b]


def _json_calls(begin: str, end: str) -> dict[str, Any]:
    return {"open": begin, "close": end, "content": "json", "repeats": True,
            "transform": {"name": "{content.name}", "arguments": "{content.arguments}"}}  # fmt: skip


def _listed(begin: str, end: str) -> dict[str, Any]:
    return {"open": begin, "close": end, "content": "json", "transform_each": True,
            "transform": {"name": "{name}", "arguments": "{arguments}"}}  # fmt: skip


def _headed(begin: str, end: str) -> dict[str, Any]:
    return {"open_pattern": begin, "close_pattern": end, "content": "json", "repeats": True,
            "transform": {"name": "{name}", "arguments": "{content}"}}  # fmt: skip


def _tagged(begin: str, end: str, argument: str) -> dict[str, Any]:
    reader = {
        "tag_pattern": argument,
        "value_parser": {"name": "json", "args": {"allow_non_json": True}},
    }
    return {"open_pattern": begin, "close_pattern": end, "content": "xml-inline", "content_args": reader, "repeats": True,
            "transform": {"name": "{name}", "arguments": "{content}"}}  # fmt: skip


def _bare(begin: str, end: str, mark: str) -> dict[str, Any]:
    reader = {"unquoted_keys": True, "string_delims": [[mark, mark]]}
    return {"open_pattern": re.escape(begin) + r"call:(?P<name>\w+)", "close": end, "content": "json", "content_args": reader,
            "repeats": True, "transform": {"name": "{name}", "arguments": "{content}"}}  # fmt: skip


_PYTHON = {"content": "python-call-list", "transform_each": True, "transform": {"name": "{name}", "arguments": "{arguments}"}}  # fmt: skip
_KEYED = r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
_DSML = r'<｜DSML｜parameter name="(?P<key>\w+)" string="\w+">(?P<value>.*?)</｜DSML｜parameter>'
TRANSFORMERS = {
    "hermes": _json_calls("<tool_call>", "</tool_call>"),
    "qwen3-coder": _tagged(
        r"<tool_call>\s*<function=(?P<name>\w+)>", r"</function>\s*</tool_call>",
        r"<parameter=(?P<key>\w+)>\n(?P<value>.*?)\n</parameter>",
    ),
    "glm-4.5": _tagged(r"<tool_call>(?P<name>\w+)", "</tool_call>", _KEYED),
    "hunyuan-3": _tagged(r"<tool_call>(?P<name>\w+)<tool_sep>", "</tool_call>", _KEYED),
    "minimax-m2": _tagged(
        r'<invoke name="(?P<name>\w+)">', "</invoke>", r'<parameter name="(?P<key>\w+)">(?P<value>.*?)</parameter>'
    ),
    "deepseek-v3.2": _tagged(r'<｜DSML｜invoke name="(?P<name>\w+)">', "</｜DSML｜invoke>", _DSML),
    "deepseek-v4": _tagged(r'<｜DSML｜invoke name="(?P<name>\w+)">', "</｜DSML｜invoke>", _DSML),
    "deepseek-v3": _headed(r"<｜tool▁call▁begin｜>(?P<name>\w+)<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "kimi-k2": _headed(
        r"<\|tool_call_begin\|>functions\.(?P<name>\w+):\d+<\|tool_call_argument_begin\|>", r"<\|tool_call_end\|>"
    ),
    "mistral": _headed(r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]", r"(?=\[TOOL_CALLS\])|$"),
    "granite-3": _listed("<|tool_call|>", "<end>"),
    "nemotron-2": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan-a13b": _listed("<tool_calls>", "</tool_calls>"),
    "llama-4": {"open": "<|python_start|>", "close": "<|python_end|>", **_PYTHON},
    "lfm-2": {"open": "<|tool_call_start|>", "close": "<|tool_call_end|>", **_PYTHON},
    "gemma-4": _bare("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function-gemma": _bare("<start_function_call>", "<end_function_call>", "<escape>"),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_calls_are_those_that_transformers_parses(name: str) -> None:
    parsing = pytest.importorskip(
        "transformers.utils.chat_parsing", reason="this transformers has no parser of answers"
    )
    text = WRITERS[name](CALLS)
    template = {"start_anchor": "<start>", "fields": {"calls": TRANSFORMERS[name], "content": {}}}
    message = parsing.parse_response(text, template, prefix="<start>")
    expected = [(call["name"], call["arguments"]) for call in message["calls"]]
    _, calls = read([text], [NAMED[name]])
    assert found(calls) == expected == CALLS
