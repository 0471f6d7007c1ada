"""Forms of thinking: what each is, in pieces of any size, as transformers' parser reads it, and which one a template writes."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.inference.server.pieces import Choice, Piece
from megatron_lite.inference.server.reasoning import Thinking, begun_by, with_reasoning
from megatron_lite.inference.server.thinking_forms import FORMS, NAMES, thinking_forms_of

NAMED = {form.name: form for form in FORMS}
WRITTEN = {
    "deepseek-r1": ("<think>\n", "THOUGHT\n</think>\n\nANSWER"),
    "mistral": ("[THINK]", "THOUGHT[/THINK]ANSWER"),
    "gemma-4": ("<|channel>thought\n", "THOUGHT<channel|>ANSWER"),
    "seed-oss": ("<seed:think>", "THOUGHT</seed:think>\nANSWER"),
    "minimax-m3": ("<mm:think>", "THOUGHT</mm:think>ANSWER"),
    "kimi-vl": ("◁think▷", "THOUGHT◁/think▷ANSWER"),
    "apertus": ("<|inner_prefix|>", "THOUGHT<|inner_suffix|>ANSWER"),
    "command-a": ("<|START_THINKING|>", "THOUGHT<|END_THINKING|><|START_RESPONSE|>ANSWER<|END_RESPONSE|>"),
    "command-a-plus": ("<|START_THINKING|>", "THOUGHT<|END_THINKING|><|START_TEXT|>ANSWER<|END_TEXT|>"),
    "granite-3.2": ("Here is my thought process:\n", "THOUGHT\n\nHere is my response:\n\nANSWER"),
    "pangu": ("[unused16]", "THOUGHT[unused17]ANSWER"),
    "exaone-deep": ("<thought>\n", "THOUGHT\n</thought>\n\nANSWER"),
    "reka-flash-3": ("<reasoning>\n", "THOUGHT\n</reasoning>\nANSWER"),
    "apriel": ("Here are my reasoning steps:\n", "THOUGHT\n[BEGIN FINAL RESPONSE]\nANSWER\n[END FINAL RESPONSE]"),
    "hunyuan-3": ("<think:opensource>", "THOUGHT</think:opensource>ANSWER"),
    "hunyuan-a13b": ("<think>\n", "THOUGHT\n</think>\n<answer>\nANSWER\n</answer>"),
    "ernie-4.5": ("<think>\n", "THOUGHT\n</think>\n\n<response>\nANSWER\n</response>\n"),
}  # fmt: skip
"""The marks of an answer as the templates and the parsers of vLLM and SGLang have them: (what a prompt may end with, the rest)."""


def separated(texts: Sequence[str], name: str, prompt: str = "") -> tuple[str, str]:
    """(thinking, answer) of an answer that comes in these pieces."""
    choice = Choice()

    async def pieces() -> AsyncGenerator[Piece, None]:
        for number, text in enumerate(texts):
            yield Piece(0, text, end="stop" if number == len(texts) - 1 else None)

    async def run() -> None:
        forms = thinking_forms_of(name, "")
        async for piece in with_reasoning(pieces(), forms, prompt):
            choice.add(piece)

    asyncio.run(run())
    return choice.reasoning, choice.text


def cuts(text: str) -> list[list[str]]:
    """The text in pieces of every width."""
    return [
        [text[at : at + width] for at in range(0, len(text), width)] or [""]
        for width in range(1, len(text) + 2)
    ]


def test_every_form_has_a_name_and_an_answer() -> None:
    assert set(WRITTEN) == set(NAMED)
    assert set(NAMES) == {"auto", *NAMED}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(("thought", "answer"), [("Hm, 1 < 2.", "Yes [1].\n  No."), ("", "Yes.")])
def test_thinking_is_apart_in_pieces_of_any_size(name: str, thought: str, answer: str) -> None:
    begin, rest = WRITTEN[name]
    rest = rest.replace("THOUGHT", thought).replace("ANSWER", answer)
    for text, prompt in ((begin + rest, "hi"), (rest, "hi" + begin), (begin + rest, "hi" + begin)):
        for texts in cuts(text):
            found = separated(texts, name, prompt)
            assert (found[0].rstrip("\n"), found[1]) == (thought, answer), texts


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_without_thinking_is_whole(name: str) -> None:
    for text in ("\nYes.\n", "  <", "Here", "[", "", "<answer", "\n\n"):
        for texts in cuts(text):
            assert separated(texts, name) == ("", text)


@pytest.mark.parametrize("name", WRITTEN)
def test_thinking_that_is_cut_off_has_no_answer(name: str) -> None:
    begin, rest = WRITTEN[name]
    thought = rest[: rest.index("THOUGHT")] + "Hm <"
    for texts in cuts(begin + thought):
        assert separated(texts, name) == ("Hm <", "")
    for texts in cuts(thought):
        assert separated(texts, name, "hi" + begin) == ("Hm <", "")


@pytest.mark.parametrize("name", [name for name in NAMED if NAMED[name].answer])
def test_an_answer_that_is_cut_off_or_without_thinking_has_no_marks(name: str) -> None:
    begin, rest = WRITTEN[name]
    text = begin + rest.replace("THOUGHT", "Hm.").replace("ANSWER", "Yes.")
    cut = text[: text.index("Yes.") + 3]
    for texts in cuts(cut):
        assert separated(texts, name)[1] == "Yes"
    only_answer = text[text.index(NAMED[name].ends[0]) :]
    for texts in cuts(only_answer):
        assert separated(texts, name) == ("", "Yes.")


@pytest.mark.parametrize("name", [name for name in NAMED if NAMED[name].repeats])
def test_thinking_may_follow_in_the_answer(name: str) -> None:
    begin, rest = WRITTEN[name]
    once = begin + rest.replace("THOUGHT", "Hm.").replace("ANSWER", "Yes.")
    for texts in cuts(once + "\n" + once):
        assert separated(texts, name) == ("Hm.\n\nHm.", "Yes.\nYes.")


def test_the_end_of_thinking_alone_has_no_text() -> None:
    """MiniMax M3 and GLM begin an answer without thinking with it."""
    for texts in cuts("</mm:think>Yes.</mm:think>"):
        assert separated(texts, "minimax-m3") == ("", "Yes.</mm:think>")


def test_an_answer_in_an_unknown_form_is_any_of_them() -> None:
    for name, (begin, rest) in WRITTEN.items():
        if NAMED[name].answer is None:
            text = begin + rest.replace("THOUGHT", "Hm.").replace("ANSWER", "[THINK]")
            expected = ("Hm.", "[THINK]") if name != "mistral" else ("Hm.", "")
            for texts in cuts(text):
                found = separated(texts, "auto")
                assert (found[0].rstrip("\n"), found[1]) == expected
    assert separated(["A [THINK]b[/THINK]"], "auto") == ("", "A [THINK]b[/THINK]")
    assert separated(["<answer>a</answer>"], "auto") == ("", "<answer>a</answer>")


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_size_of_the_pieces_changes_nothing_in_broken_answers(name: str, data: Any) -> None:
    """Marks in any order, and parts of them."""
    marks = [*NAMED[name].all_marks, "\n", "a", " ", "<", "Here"]
    marks += [mark[: len(mark) // 2] for mark in marks]
    text = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=8)))
    begun = data.draw(st.booleans())
    forms = (NAMED[name],)
    whole = Thinking(forms, begun=begun).add(text, last=True)
    for width in (1, 2, 5):
        thinking = Thinking(forms, begun=begun)
        texts = [text[at : at + width] for at in range(0, len(text), width)]
        found = [thinking.add(each, last=False) for each in texts] + [thinking.add("", last=True)]
        assert tuple("".join(parts) for parts in zip(*found, strict=True)) == whole


def test_text_is_passed_on_as_soon_as_it_is_no_mark() -> None:
    thinking = Thinking((NAMED["ernie-4.5"],))
    texts = (
        "<thi",
        "nk>a",
        " <b",
        "\n</",
        "think>",
        "\n<resp",
        "onse>c",
        "\n</x",
        "\n</response>",
        "d",
    )
    expected = [
        ("", ""), ("a", ""), (" <b", ""), ("\n", ""), ("", ""), ("", ""), ("", "c"), ("", "\n</x"), ("", ""), ("", "d"),
    ]  # fmt: skip
    assert [thinking.add(text, last=False) for text in texts] == expected


TEMPLATES = {
    "mistral": "{{ '[THINK]' + block['thinking'] + '[/THINK]' }}",
    "gemma-4": "{{- '<|channel>thought\\n' + thinking_text + '\\n<channel|>' -}}",
    "seed-oss": "{%- set think_begin_token = '<seed:think>' -%}",
    "minimax-m3": "{{- '<mm:think>' -}}",
    "kimi-vl": "{{ '◁think▷' }}",
    "apertus": "{%- set inner_token = '<|inner_prefix|>' -%}",
    "command-a": "<|CHATBOT_TOKEN|>{% if reasoning %}<|START_THINKING|>{% else %}<|START_THINKING|><|END_THINKING|>{% endif %}",
    "command-a-plus": "<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|><|START_TEXT|>{{ m.content }}<|END_TEXT|>",
    "granite-3.2": "{{ \"Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'\" }}",
    "pangu": "{{ '[unused16]' }}",
    "exaone-deep": "{{ '[|assistant|]<thought>\\n' }}",
    "reka-flash-3": "{{ 'assistant: <reasoning>\\n' }}",
    "apriel": "{{ 'Here are my reasoning steps:\\n' }}{{ content.split('[BEGIN FINAL RESPONSE]')[-1] }}",
    "hunyuan-3": "{%- set think_begin_token = '<think{}>'.format(HYTK) %}",
    "hunyuan-a13b": "{%- set content = content.split('<answer>')[-1].split('</answer>')[0] %}{{ '<think>' }}",
    "ernie-4.5": "{{ '<think>\\n' }}{{ '<response>\\n' + m['content'] + '\\n</response>\\n' }}",
    "deepseek-r1": "{{- '<think>\\n' + reasoning_content + '\\n</think>' }}",
}  # fmt: skip


def test_the_chat_template_says_which_form_it_is() -> None:
    assert set(TEMPLATES) == set(NAMED)
    for name, template in TEMPLATES.items():
        assert [form.name for form in thinking_forms_of("auto", template)] == [name]
    assert len(thinking_forms_of("auto", "{{ messages }}")) > 9
    assert [form.name for form in thinking_forms_of("mistral", TEMPLATES["gemma-4"])] == ["mistral"]


def test_a_prompt_with_whole_thinking_begins_none() -> None:
    """Templates write empty thinking if a variable switches it off."""
    for name, (begin, rest) in WRITTEN.items():
        forms = (NAMED[name],)
        assert begun_by("hi" + begin, forms) == forms
        assert (
            begun_by("hi" + begin + rest[rest.index("THOUGHT") + 7 : rest.index("ANSWER")], forms)
            == ()
        )


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "deepseek-r1": {"thinking": {"open": "<think>\n", "close": "\n</think>"}},
    "mistral": {"thinking": {"open": "[THINK]", "close": "[/THINK]"}},
    "gemma-4": {"thinking": {"open": "<|channel>thought\n", "close": "<channel|>"}},
    "seed-oss": {"thinking": {"open": "<seed:think>", "close": "</seed:think>"}},
    "kimi-vl": {"thinking": {"open": "◁think▷", "close": "◁/think▷"}},
    "command-a": {
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
    },
    "hunyuan-a13b": {
        "thinking": {"open": "<think>\n", "close": "\n</think>"},
        "content": {"open": "<answer>\n", "close": "\n</answer>"},
    },
    "ernie-4.5": {
        "thinking": {"open": "<think>\n", "close": "\n</think>"},
        "content": {"open": "<response>\n", "close": "\n</response>"},
    },
    "granite-3.2": {
        "thinking": {"open": ["Here is my thought process:", "Here's my thought process:"],
                     "close": ["Here is my response:", "Here's my response:"]},
    },
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("in_prompt", [False, True])
def test_thinking_is_what_transformers_parses(name: str, in_prompt: bool) -> None:
    parsing = pytest.importorskip(
        "transformers.utils.chat_parsing", reason="this transformers has no parser of answers"
    )
    begin, rest = WRITTEN[name]
    rest = rest.replace("THOUGHT", "Hm, 1 < 2.").replace("ANSWER", "Yes.")
    prompt, text = (begin, rest) if in_prompt else ("", begin + rest)
    fields = {"content": {}, **TRANSFORMERS[name]}
    template = {"start_anchor": "<start>", "fields": fields}
    message = parsing.parse_response(text, template, prefix="<start>" + prompt)
    thought, answer = separated([text], name, prompt)
    assert (thought.strip(), answer) == (message["thinking"].strip(), message["content"].strip())
    assert (thought.strip(), answer) == ("Hm, 1 < 2.", "Yes.")
