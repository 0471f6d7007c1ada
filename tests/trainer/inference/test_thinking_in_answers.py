"""Thinking in the server's answers and streams, for a tokenizer that has its marks as special tokens."""

import json
from typing import Any

import pytest

from megatron_lite.data.tokenizer import HuggingFaceTokenizer
from tests.trainer.inference.forced import answered, byte_tokenizer
from tests.trainer.inference.written_calls import WRITERS

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("starlette", reason="starlette is not installed (extra `serve`)")

SPECIAL = [
    "</s>", "<pad>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>",
    '<|"|>', "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% set marks = '[THINK] [TOOL_CALLS]' %}"
    "{% if thinking is defined %}{{ '[THINK]' if thinking else '[THINK][/THINK]' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
CALLS = [("weather", {"city": "Köln"}), ("time", {"zone": "{"})]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("thinking"), SPECIAL, TEMPLATE)


def messages(
    tokenizer: HuggingFaceTokenizer, text: str, reasoning: str | None = "auto", **fields: Any
) -> list[dict[str, Any]]:
    """The messages of a whole and of a streamed answer, which are the same."""
    (whole,) = answered(tokenizer, [text + "</s>"], fields, reasoning=reasoning)
    streamed: dict[str, Any] = {"content": ""}
    parts = answered(tokenizer, [text + "</s>"], {**fields, "stream": True}, reasoning=reasoning)
    for part in parts:
        for key, value in part["choices"][0]["delta"].items():
            streamed[key] = streamed.get(key, type(value)()) + value
    message = whole["choices"][0]["message"]
    assert parts[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert streamed["content"] == (message["content"] or "")
    assert streamed.get("reasoning_content") == message.get("reasoning_content")
    assert called(streamed) == called(message)
    return [message, streamed]


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


def test_marks_that_are_special_tokens_are_read_and_not_shown(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    for message in messages(tokenizer, "[THINK]Hm, <pad>ö.[/THINK]Yes.<pad>"):
        assert message == {
            "role": "assistant",
            "content": "Yes.",
            "reasoning_content": "Hm, ö.",
        }


def test_without_the_option_no_mark_is_shown(tokenizer: HuggingFaceTokenizer) -> None:
    for message in messages(tokenizer, "[THINK]Hm.[/THINK]Yes.", None):
        assert message == {"role": "assistant", "content": "Hm.Yes."}


def test_a_variable_of_the_template_opens_or_closes_the_thinking(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    for thinking, text, thought in ((True, "Hm.[/THINK]Yes.", "Hm."), (False, "Yes.", None)):
        kwargs = {"chat_template_kwargs": {"thinking": thinking}}
        for message in messages(tokenizer, text, **kwargs):
            assert (message.get("reasoning_content"), message["content"]) == (thought, "Yes.")


def test_an_option_names_another_form(tokenizer: HuggingFaceTokenizer) -> None:
    for message in messages(tokenizer, "<|channel>thought\nHm.<channel|>Yes.", "gemma-4"):
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    for message in messages(tokenizer, "<|channel>thought\nHm.<channel|>Yes."):
        assert message["content"] == "thought\nHm.Yes."


def test_calls_follow_the_thinking(tokenizer: HuggingFaceTokenizer) -> None:
    text = "[THINK]The tool?[/THINK]I look." + WRITERS["mistral"](CALLS)
    for message in messages(tokenizer, text, tools=TOOLS):
        assert (message["reasoning_content"], message["content"]) == ("The tool?", "I look.")
        assert called(message) == CALLS


def test_a_call_at_the_end_of_thinking_that_never_ended_is_one(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    """Kimi K2 and Qwen 3.5 sometimes call a tool without an end of their thinking, as vLLM's and SGLang's parsers know."""
    text = "[THINK]The tool?" + WRITERS["mistral"](CALLS)
    for message in messages(tokenizer, text, tools=TOOLS):
        assert called(message) == CALLS
        assert message["reasoning_content"].startswith("The tool?")


@pytest.mark.parametrize(
    "text",
    [
        "[THINK]" + WRITERS["mistral"](CALLS) + "[/THINK]No.",
        "[THINK]" + WRITERS["mistral"]([("unknown", {})]),
        "[THINK]" + WRITERS["mistral"](CALLS)[:-1],
        "[THINK]" + WRITERS["mistral"](CALLS) + " Hm.",
    ],
)
def test_a_call_that_the_model_only_thinks_of_is_none(
    tokenizer: HuggingFaceTokenizer, text: str
) -> None:
    for message in messages(tokenizer, text, tools=TOOLS):
        assert called(message) == []


def test_each_choice_has_thinking_of_its_own(tokenizer: HuggingFaceTokenizer) -> None:
    texts = ["[THINK]a[/THINK]b</s>", "c</s>", "[THINK]d</s>"]
    (answer,) = answered(tokenizer, texts, {"n": 3}, reasoning="auto")
    found = [choice["message"] for choice in answer["choices"]]
    expected = [("a", "b"), (None, "c"), ("d", "")]
    assert [(each.get("reasoning_content"), each["content"]) for each in found] == expected
